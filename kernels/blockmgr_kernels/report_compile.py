"""What the GPU compilers make of the Triton kernels, on any machine: registers, spills, shared memory, instructions.

    python -m blockmgr_kernels.report_compile --target sm_90,gfx942 --config bf16

The launches compiled are those of the launchers: each configuration calls `triton_entries` with small tensors and a
named target, the kernels are replaced by something that notes the arguments, and these are specialised as Triton's
launcher does it (an integer 1 is a constant, multiples of 16 are marked). So the report can't drift from what runs.
The compilers and disassemblers are those inside the Triton wheel. Which configurations there are: report_cases.py.

Not in a process with TRITON_INTERPRET=1: there the kernels are no compiler's input.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .report_cases import CASES, TARGETS, Launch, recorded

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip

SASS = {
    "loads_128": r"\bLDG\.\S*128",
    "async_128": r"\bLDGSTS\.\S*128",
    "async_copies": r"\b(LDGSTS|UTMALDG)",
    "tensor_core": r"\b(HMMA|HGMMA|IMMA|QMMA|QGMMA|UTC\w*MMA)\b",
}
GCN = {
    "loads_128": r"\b(global|buffer)_load_(dwordx4|b128)",
    "async_128": r"\b(global_load_lds|buffer_load)_dwordx4\b.*\blds\b",
    "async_copies": r"\bglobal_load_lds|\bbuffer_load\S* .*\blds\b",
    "tensor_core": r"\bv_(mfma|wmma|swmmac)",
}


@dataclass(frozen=True)
class Processor:
    """What an SM, CU or WGP holds: 32-bit registers (AMD: of each of 4 SIMDs, a lane), their granule, shared bytes."""

    registers: int
    granule: int
    shared: int
    warps: int
    block_shared: int  # bytes of shared memory that one block may have
    blocks: int = 32


PROCESSORS = {
    "sm_80": Processor(65536, 8, 164 << 10, 64, 163 << 10),
    "sm_89": Processor(65536, 8, 100 << 10, 48, 99 << 10, 24),
    "sm_90": Processor(65536, 8, 228 << 10, 64, 227 << 10),
    "sm_100": Processor(65536, 8, 228 << 10, 64, 227 << 10),
    "sm_120": Processor(65536, 8, 100 << 10, 48, 99 << 10, 24),
    "gfx90a": Processor(512, 8, 64 << 10, 32, 64 << 10),
    "gfx942": Processor(512, 8, 64 << 10, 32, 64 << 10),
    "gfx950": Processor(512, 8, 160 << 10, 32, 160 << 10),
    "gfx1100": Processor(1536, 24, 128 << 10, 64, 64 << 10),
    "gfx1201": Processor(1536, 24, 128 << 10, 64, 64 << 10),
}


@dataclass
class Row:
    """One kernel, compiled for one target.

    registers: a thread's (AMD: vector registers a lane, accumulators included); spills: registers kept in memory;
    shared_bytes: of a block; occupancy: warps resident on a processor over those it could hold, an estimate from
    registers and shared memory; the rest: instructions in the code (static count).
    """

    kernel: str
    config: str
    target: str
    warps: int
    stages: int
    registers: int
    spills: int
    shared_bytes: int
    occupancy: float
    loads_128: int = 0
    async_copies: int = 0
    async_128: int = 0
    tensor_core: int = 0
    units: list[str] = field(default_factory=list)  # which tensor-core instructions
    narrow: list[str] = field(default_factory=list)  # PTX that multiplies a stride in 32 bits; there must be none
    error: str = ""


def gpu_target(name: str) -> GPUTarget:
    """Triton's target of "sm_90" or "gfx942"."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


def source(launch: Launch) -> ASTSource:
    """The kernel with its arguments specialised, as Triton's launcher specialises them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    marks: dict[tuple[int, ...], list[list[Any]]] = {}
    kernel: Any = launch.kernel
    for place, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params)):
        value = launch.arguments[name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            marks[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, marks)


def compiled(launch: Launch, target: str) -> Any:
    """Triton's compiled kernel: `.asm` holds every stage, `.metadata` warps and shared memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return triton.compile(source(launch), target=gpu_target(target), options=launch.options)


def row(launch: Launch, target: str) -> Row:
    """Compile one launch for one target."""
    kernel = compiled(launch, target)
    read = _nvidia if target.startswith("sm_") else _amd
    registers, spills, code, table = read(kernel)
    warps, shared = int(kernel.metadata.num_warps), int(kernel.metadata.shared)
    if shared > PROCESSORS[target].block_shared:
        raise RuntimeError(f"{shared} bytes of shared memory, {target} has {PROCESSORS[target].block_shared} a block")
    counts: dict[str, Any] = {name: len(re.findall(pattern, code)) for name, pattern in table.items()}
    units = sorted({m.group(0).removeprefix("v_") for m in re.finditer(table["tensor_core"], code)})
    narrow = narrow_products(launch, kernel.asm["ptx"]) if "ptx" in kernel.asm else []
    return Row(
        str(kernel.metadata.name), launch.config, target, warps, int(launch.arguments.get("STAGES", 1)), registers,
        spills, shared, occupancy(target, registers, shared, warps), units=units,
        narrow=narrow, **counts,
    )  # fmt: skip


def narrow_products(launch: Launch, ptx: str) -> list[str]:
    """PTX instructions that multiply a stride and keep 32 bits of the product: wrong offsets past 2^31 elements.

    Strides are the arguments named *_n, *_b, *_h, *_t, *_d, *_x, *_y; their registers are followed through moves.
    """
    arguments = [
        name
        for name, parameter in zip(launch.kernel.arg_names, launch.kernel.params)
        if not parameter.is_constexpr and not (isinstance(launch.arguments[name], int) and launch.arguments[name] == 1)
    ]
    strides = {str(place) for place, name in enumerate(arguments) if re.search(r"_[nbhtdxy]$", name)}
    loads = re.findall(r"ld\.param\.[bsu]32\s+(%r\d+), \[\w+_param_(\d+)\]", ptx)
    tainted = {register for register, place in loads if place in strides}
    moves = re.findall(r"mov\.[bsu]32\s+(%r\d+), (%r\d+);", ptx)
    while grown := {into for into, of in moves if of in tainted} - tainted:
        tainted |= grown
    products = re.findall(r"^\s*((?:mul|mad)\.lo\.[su]32|shl\.b32)\s+([^;]*);", ptx, re.M)
    return [
        f"{operation} {operands}"
        for operation, operands in products
        if tainted & set(re.findall(r"%r\d+\b", operands.split(",", 1)[1]))
    ]


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(BIN / name), *arguments], check=True, capture_output=True, text=True).stdout


def _nvidia(kernel: Any) -> tuple[int, int, str, dict[str, str]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        use, code = _tool("cuobjdump", "-res-usage", file.name), _tool("nvdisasm", "-c", file.name)
    registers, stack = (int(re.findall(rf"\b{key}:(\d+)", use)[0]) for key in ("REG", "STACK"))
    # Triton's own count is local bytes / 4. These kernels have no arrays, so a stack frame is spills and nothing else.
    return registers, -(-stack // 4), code, SASS


def _amd(kernel: Any) -> tuple[int, int, str, dict[str, str]]:
    code = kernel.asm["amdgcn"]

    def value(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", code)
        return int(found.group(1)) if found else 0

    return value("vgpr_count"), max(value("vgpr_spill_count"), -(-value("private_segment_fixed_size") // 4)), code, GCN


def occupancy(target: str, registers: int, shared: int, warps: int) -> float:
    """Resident warps over the most that the processor holds; 0 where one block does not fit."""
    holds = PROCESSORS[target]
    taken = max(1, -(-registers // holds.granule)) * holds.granule
    if target.startswith("sm_"):
        by_registers = holds.registers // (taken * 32) // warps
        by_shared = holds.shared // (-(-shared // 128) * 128 + 1024)  # a block costs 1 KiB of its own
    else:
        by_registers = min(holds.warps // 4, holds.registers // taken) * 4 // warps
        by_shared = holds.shared // shared if shared else holds.blocks
    blocks = min(by_registers, by_shared, holds.warps // warps, holds.blocks)
    return round(blocks * warps / holds.warps, 2)


def rows(targets: tuple[str, ...], config: str = "") -> Iterator[Row]:
    """Every launch of every case whose "kernel config" contains one of the texts of `config`, divided by |.

    A target's compiler that refuses a kernel makes a row with `error` and no figures.
    """
    for target in targets:
        done: set[tuple[str, str]] = set()
        for case in CASES:
            for launch in recorded(case, target):
                name = (launch.kernel.__name__, launch.config)
                if name in done or not any(part in " ".join(name) for part in config.split("|")):
                    continue
                done.add(name)
                try:
                    yield row(launch, target)
                except Exception as error:  # a finding, not a crash: it becomes a row that fails
                    yield Row(*name, target, 0, 0, 0, 0, 0, 0.0, error=f"{type(error).__name__}: {error}"[:300])


def main() -> None:
    """One JSON object a line, a row each."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU.")
    parser.add_argument("--target", default=",".join(TARGETS))
    parser.add_argument("--config", default="")
    arguments = parser.parse_args()
    for made in rows(tuple(arguments.target.split(",")), arguments.config):
        print(json.dumps(asdict(made)), flush=True)


if __name__ == "__main__":
    if triton.knobs.runtime.interpret:
        sys.exit("report_compile: unset TRITON_INTERPRET, interpreted kernels can't be compiled")
    main()
