"""Request logs, and the batches that a continuous-batching scheduler makes of them."""

from mlaplan.workload.generated import generated_log
from mlaplan.workload.log import LogError, Request, read_log
from mlaplan.workload.scheduler import Scheduler, SchedulerConfig, SchedulerStats, Step, rows_unchanged

__all__ = [
    "LogError",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "Step",
    "generated_log",
    "read_log",
    "rows_unchanged",
]
