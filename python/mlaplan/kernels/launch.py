"""What a launcher hands to Triton, as a value that can be run, compiled offline or executed elsewhere."""

from __future__ import annotations

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """One launch of one kernel.

    Attributes:
        kernel: The `triton.jit` function.
        grid: Programs along each axis.
        args: Values of the kernel's parameters in order, constants left out.
        constants: Values of its `tl.constexpr` parameters by name.
        options: Compile options, such as `num_warps`.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        """Launches on the current stream of the current device."""
        self.kernel[self.grid](*self.args, **self.constants, **self.options)


def next_power_of_two(value: int) -> int:
    """Returns the smallest power of two that is at least `value`, and 1 for a value below 1."""
    return 1 << max(0, value - 1).bit_length()


class CompiledLaunch:
    """A launch that was run once, repeated through the compiled kernel's own launcher: 9 us instead of 15 or more.

    Triton's usual way binds and specialises every argument anew. Here only the leading arguments may change, to
    arrays at the very same addresses; who calls it sees to that. `CompiledKernel.__getitem__` is public but says
    little of its arguments, so a Triton that does not fit is left alone: `prepare` then returns None.
    """

    __slots__ = ("_runner", "_tail")

    def __init__(self, runner: Any, tail: tuple[Any, ...]) -> None:
        """Keeps what `prepare` found."""
        self._runner = runner
        self._tail = tail

    @classmethod
    def prepare(cls, launch: Launch, leading: int) -> CompiledLaunch | None:
        """Runs a launch in the usual way, and returns what repeats it.

        Args:
            launch: The launch.
            leading: How many of its first arguments will be given again.
        """
        compiled = launch.kernel[launch.grid](*launch.args, **launch.constants, **launch.options)
        names = getattr(launch.kernel, "arg_names", None)
        if names is None or not hasattr(compiled, "launch_metadata") or not hasattr(compiled, "packed_metadata"):
            return None
        values = dict(launch.constants) | dict(
            zip((name for name in names if name not in launch.constants), launch.args, strict=True)
        )
        ordered = tuple(values[name] for name in names)
        return cls(compiled[(*launch.grid, 1, 1)[:3]], ordered[leading:])

    def run(self, stream: int, *leading: Any) -> None:
        """Launches on a raw stream.

        Args:
            stream: The stream's handle.
            leading: The first arguments.
        """
        self._runner(*leading, *self._tail, stream=stream)
