"""What a launcher hands to Triton, as a value that can be run, compiled offline or executed elsewhere."""

from __future__ import annotations

from typing import Any, NamedTuple

# Releases of Triton in which `CompiledKernel.run` takes grid, stream, function, metadata, three for hooks, arguments.
_DIRECT = ((3, 6), (3, 7))


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
    """A launch that was run once, repeated with other leading arrays: 6 us instead of 37 on the host of an H200.

    Triton's usual way binds and specialises every argument anew, and asks every array for its address and the driver
    whether that is the device's. Here arrays have become addresses; that they are those of live arrays is up to who
    calls, and that leading ones are multiples of 16 where those of the first launch were: Triton compiles for that.
    `CompiledKernel.__getitem__` is public and says little of its arguments, so a Triton that does not fit is left
    alone: `prepare` then returns None. One level lower, `CompiledKernel.run` takes the hooks of profilers as
    arguments, and without any there is nothing to prepare for them; it is called in releases whose form was read.
    """

    __slots__ = ("_direct", "_function", "_grid", "_hooks", "_metadata", "_runner", "_tail")

    def __init__(self, compiled: Any, grid: tuple[int, int, int], tail: tuple[Any, ...], hooks: Any) -> None:
        """Keeps what `prepare` found."""
        self._runner = compiled[grid]
        self._grid = grid
        self._tail = tail
        self._hooks = hooks
        if hooks is not None:
            self._direct = compiled.run
            self._function = compiled.function
            self._metadata = compiled.packed_metadata

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
        tail = (values[name] for name in names[leading:])
        addresses = tuple(value.data_ptr() if hasattr(value, "data_ptr") else value for value in tail)
        grid = (*launch.grid, 1, 1)[:3]
        return cls(compiled, (grid[0], grid[1], grid[2]), addresses, _hooks())

    def run(self, stream: int, *leading: int) -> None:
        """Launches on a raw stream.

        Args:
            stream: The stream's handle.
            leading: The first arguments, arrays by their addresses.

        Raises:
            TypeError: This Triton's launcher takes other arguments. Nothing was launched.
        """
        hooks = self._hooks
        if hooks is None or _calls(hooks.launch_enter_hook) or _calls(hooks.launch_exit_hook):
            self._runner(*leading, *self._tail, stream=stream)
            return
        x, y, z = self._grid
        self._direct(x, y, z, stream, self._function, self._metadata, None, None, None, *leading, *self._tail)


def _hooks() -> Any:
    """Where Triton keeps the hooks of a launch, None for a release whose launcher was not read."""
    import triton

    release = tuple(int(part) for part in triton.__version__.split(".")[:2] if part.isdigit())
    return triton.knobs.runtime if release in _DIRECT else None


def _calls(hook: Any) -> bool:
    """Whether somebody wants to be called; a chain without links is there in any case."""
    return bool(getattr(hook, "calls", hook is not None))
