"""Compiles a launch without a GPU, and reads what the compiler says about the result."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mlaplan.kernels.launch import Launch

_TYPES = {"int32": "*i32", "float32": "*fp32", "float16": "*fp16", "uint16": "*bf16"}
HOPPER = GPUTarget("cuda", 90, 32)
LDS_BYTES = {"gfx942": 65536, "gfx950": 163840}  # per workgroup


class Key(NamedTuple):
    """What Triton compiles for: two launches of equal keys run the same code."""

    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]


class Usage(NamedTuple):
    """What a kernel takes, from the metadata of its code object."""

    lds_bytes: int
    scratch_bytes: int
    vgprs: int
    vgpr_spills: int
    sgpr_spills: int


class CudaUsage(NamedTuple):
    """What a kernel takes on an NVIDIA GPU; spilled registers lie on the stack."""

    shared_bytes: int
    registers: int
    stack_bytes: int


def key_of(launch: Launch, types: dict[str, str] | None = None) -> Key:
    """The compile key of a launch of NumPy arrays; `types` names the types that NumPy lacks."""
    kernel, constants = launch.kernel, dict(launch.constants)
    names = [name for name in kernel.arg_names if name not in constants]
    specialised = {param.name: not param.do_not_specialize for param in kernel.params}
    aligned = {param.name: not param.do_not_specialize_on_alignment for param in kernel.params}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for name, value in zip(names, launch.args, strict=True):
        at = (kernel.arg_names.index(name),)
        if hasattr(value, "dtype"):
            signature[name] = (types or {}).get(name) or _TYPES[str(value.dtype)]
            # as for a torch tensor of less than 2 GiB
            attributes[at] = [["tt.divisibility", 16]] if aligned[name] else []
            attributes[at] += [["tt.pointer_range", 32]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            if specialised[name] and value == 1:
                constants[name] = 1
            elif specialised[name] and value % 16 == 0:
                attributes[at] = [["tt.divisibility", 16]]
    signature.update(dict.fromkeys(constants, "constexpr"))
    return Key({name: signature[name] for name in kernel.arg_names}, constants, attributes, launch.options)


def compile_for(launch: Launch, target: GPUTarget, types: dict[str, str] | None = None) -> Any:
    """The compiled kernel of a launch."""
    key = key_of(launch, types)
    source = _source_type(launch)(
        fn=launch.kernel, signature=key.signature, constexprs=key.constants, attrs=key.attributes
    )
    return triton.compile(source, target=target, options=key.options)


def _source_type(launch: Launch) -> Any:
    is_gluon = getattr(launch.kernel, "is_gluon", None)
    if is_gluon is None or not is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def compile_amd(launch: Launch, arch: str, types: dict[str, str] | None = None) -> Any:
    """The compiled kernel of a launch for gfx942 or gfx950."""
    return compile_for(launch, GPUTarget("hip", arch, 64), types)


def usage(compiled: Any) -> Usage:
    """Reads the metadata in the assembly."""
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        if found is None:
            raise ValueError(f"the code object's metadata has no {name}")
        return int(found[1])

    return Usage(
        lds_bytes=max(number("group_segment_fixed_size"), int(compiled.metadata.shared)),
        scratch_bytes=number("private_segment_fixed_size"),
        vgprs=number("vgpr_count"),
        vgpr_spills=number("vgpr_spill_count"),
        sgpr_spills=number("sgpr_spill_count"),
    )


def cuda_usage(compiled: Any) -> CudaUsage:
    """Asks the disassembler that comes with Triton."""
    text = _of_cubin(compiled, "cuobjdump", "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"no usage in {text!r}")
    return CudaUsage(int(compiled.metadata.shared), int(found[1]), int(found[2]))


def cuda_instructions(compiled: Any) -> list[str]:
    """The instructions for an NVIDIA GPU, in the order they lie in."""
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*?)\s*;", _of_cubin(compiled, "nvdisasm", "-c"))


def _of_cubin(compiled: Any, name: str, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout


def stray_scalar_loads(assembly: str) -> list[str]:
    """Scalar loads from anything but the kernel's argument segment.

    The segment's address comes in a pair of scalar registers. A load through that pair counts as one from the
    segment as long as nothing in the text above has written to it.
    """
    first = 0
    for name, registers in (("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2)):
        first += registers * (re.search(rf"\.amdhsa_user_sgpr_{name}\s+1", assembly) is not None)
    if not re.search(r"\.amdhsa_user_sgpr_kernarg_segment_ptr\s+1", assembly):
        raise ValueError("the kernel does not ask for the address of its arguments")
    segment = f"s[{first}:{first + 1}]"
    overwritten = False
    stray = []
    for line in assembly.splitlines():
        found = re.match(r"\s+([sv]_\w+)\s+(s\d+|s\[\d+:\d+\]|\S+?)(?:,\s*(\S+?))?(?:,|\s|$)", line)
        if found is None:
            continue
        mnemonic, target, base = found.groups()
        if re.match(r"s_(buffer_|scratch_)?load_", mnemonic) and (base != segment or overwritten):
            stray.append(line.strip())
        numbers = [int(number) for number in re.findall(r"\d+", target)] if target.startswith("s") else []
        if numbers and not mnemonic.startswith("s_cmp") and numbers[0] <= first + 1 and numbers[-1] >= first:
            overwritten = True
    return stray
