"""Compiling the kernels for named architectures with no GPU, and what each compiled form takes of a multiprocessor.

    python -m hf_wsvd.kernels.compile_ahead                          # every variant of every kernel module
    python -m hf_wsvd.kernels.compile_ahead general_decode --architectures 90 --json

Exits with 1 if a variant does not compile, spills registers or takes more shared memory than there is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .variants import ARCHITECTURES, Variant


# Bytes of shared memory that one program may have (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability").
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
# Stores to local memory and loads from it.
SPILL = re.compile(r"^\s+/\*(\w+)\*/\s+(?:@\S+\s+)?(?:STL|LDL)\b", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(.*)", re.MULTILINE)
JUMP = re.compile(r"\bBRA\S* (?:\S+, )?0x([0-9a-f]+)")
FEW_REGISTERS = 96  # a program of 16 warps could have 128
RARE = 64  # a loop that reads back one number in so many instructions is not slower for it
COVERED = 90  # the architecture for which a quick check covers all types and constants


class Resources(NamedTuple):
    """What a program takes of a multiprocessor.

    Attributes:
        registers: of a thread.
        spills: instructions that write registers to a thread's own memory or read them back; where warps of a program
            part, those of loops that have many, as what is handed over is put there once. A stack frame alone is
            no spill: calls of the division that rounds right have one, and mostly leave it untouched.
        shared: bytes of shared memory.
    """

    registers: int
    spills: int
    shared: int

    def complaint(self, architecture: int) -> str | None:
        """What is wrong with them on an architecture, or None."""
        # With registers to spare, the compiler may put one number into a frame that is there anyway, for once.
        if self.spills > 2 or (self.spills and self.registers > FEW_REGISTERS):
            return f"spills registers in {self.spills} instructions, at {self.registers} registers a thread"
        if self.shared > SHARED_MEMORY[architecture]:
            return f"takes {self.shared} bytes of shared memory of {SHARED_MEMORY[architecture]}"
        return None


def compile_variant(variant: Variant, architecture: int) -> Resources:
    """Compile for a compute capability such as 90 and read what the machine code takes.

    Triton keeps what it compiles in `TRITON_CACHE_DIR`. Raises ValueError where a variant's names are not those of
    its kernel's arguments, and what Triton raises where it cannot compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    compiled = triton.compile(
        _source(variant),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    registers, spills = _usage(compiled.asm["cubin"], compiled.metadata.name)
    return Resources(registers, spills, compiled.metadata.shared)


def _source(variant: Variant):
    """What Triton compiles: the kernel with the types and constants of its arguments."""
    names = variant.kernel.arg_names
    given = [*variant.signature, *variant.constexprs]
    if sorted(given) != sorted(names):
        missing, unknown = sorted(set(names) - set(given)), sorted(set(given) - set(names))
        raise ValueError(f"variant {variant.name!r}: arguments missing: {missing}; not of the kernel: {unknown}")
    if variant.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    types = {name: variant.signature.get(name, "constexpr") for name in names}
    divisible = variant.divisible
    if divisible is None:
        divisible = tuple(name for name, kind in types.items() if kind.startswith("*"))
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    return Source(variant.kernel, types, constexprs=dict(variant.constexprs), attrs=attributes)


def _usage(cubin: bytes, name: str) -> tuple[int, int]:
    """Registers of a function in machine code, and its instructions that spill them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = _cuobjdump("--dump-resource-usage", path)
        found = {match[1]: match for match in USAGE.finditer(text)}
        if name not in found:
            raise RuntimeError(f"cuobjdump says nothing of {name}: {text!r}")
        registers, stack, local = map(int, found[name].groups()[1:])
        # Without memory of its own a thread has nowhere to spill to.
        return registers, _spills(_cuobjdump("--dump-sass", path)) if stack or local else 0


def _spills(code: str) -> int:
    """Instructions that spill, see `Resources`.

    Warps that part change how many registers they have, and wait for their work in a loop around all of it, which is
    none of the loops that count.
    """
    instructions = [(int(match[1], 16), match[2]) for match in INSTRUCTION.finditer(code)]
    handovers = [address for address, text in instructions if "USETMAXREG" in text]
    spilling = [int(match[1], 16) for match in SPILL.finditer(code)]
    if not handovers:
        return len(spilling)
    jumps = [(int(match[1], 16), address) for address, text in instructions if (match := JUMP.search(text))]
    counted: set[int] = set()
    for start, end in jumps:
        if start > end or any(start <= address <= end for address in handovers):
            continue
        inside = {address for address in spilling if start <= address <= end}
        if len(inside) * RARE > sum(start <= address <= end for address, _ in instructions):
            counted |= inside
    return len(counted)


def _cuobjdump(option: str, path: Path) -> str:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}  # where nvdisasm is
    command = [str(tools / "cuobjdump"), option, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def kernel_modules() -> list[str]:
    """Names of the modules beside this one that list variants; imports them all."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if not module.ispkg]
    others = [name for name in names if name != Path(__file__).stem]
    return [name for name in others if hasattr(importlib.import_module(f".{name}", __package__), "variants")]


def variants_of(module: str) -> list[Variant]:
    """The variants that a kernel module ships. Raises ValueError for two of one name."""
    listed = list(importlib.import_module(f".{module}", __package__).variants())
    names = [variant.name for variant in listed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{module}.variants() has several of the name {', '.join(twice)}")
    return listed


def full_plan(variants: Iterable[Variant], architectures: Iterable[int]) -> Iterator[tuple[Variant, int]]:
    """Every variant for each architecture that it is launched on."""
    wanted = set(architectures)
    for variant in variants:
        yield from ((variant, architecture) for architecture in variant.architectures if architecture in wanted)


def covering_plan(variants: Iterable[Variant]) -> list[tuple[Variant, int]]:
    """Few variants that show all types and constants for sm_90, and one of each kernel for the other architectures."""
    variants = list(variants)
    plan = list(full_plan(covering(variants), [COVERED]))
    for architecture in ARCHITECTURES:
        served = [variant for variant in variants if architecture in variant.architectures and architecture != COVERED]
        plan += [(variant, architecture) for variant in {variant.kernel: variant for variant in served}.values()]
    return plan


def covering(variants: Iterable[Variant]) -> list[Variant]:
    """Few variants in which every kernel, every type of an argument (of descriptors that of their elements) and every
    word among the constants occurs, and of the numbers among them the largest."""
    variants = list(variants)
    numbers: dict[tuple[object, str], list[int]] = {}
    for variant in variants:
        for name, value in variant.constexprs.items():
            if type(value) is int:
                numbers.setdefault((variant.kernel, name), []).append(value)
    largest = {key: max(values) for key, values in numbers.items()}

    def facts(variant: Variant) -> set[tuple[object, str, object]]:
        types = ((name, kind.partition("[")[0]) for name, kind in variant.signature.items())
        items = [*types, *variant.constexprs.items()]
        return {
            (variant.kernel, name, value)
            for name, value in items
            if type(value) is not int or value == largest[variant.kernel, name]
        }

    left = {variant.name: facts(variant) for variant in variants}
    chosen = []
    while any(left.values()):
        best = max(variants, key=lambda variant: len(left[variant.name]))
        seen = set(left[best.name])
        left = {name: facts - seen for name, facts in left.items()}
        chosen.append(best)
    return chosen


def check(plan: Iterable[tuple[str, Variant, int]]) -> Iterator[dict[str, object]]:
    """Compile what is planned of named modules: one row each, with what is wrong or None."""
    for module, variant, architecture in plan:
        row = {
            "module": module,
            "kernel": variant.kernel.__name__,
            "variant": variant.name,
            "architecture": architecture,
        }
        try:
            resources = compile_variant(variant, architecture)
        except Exception as error:  # whatever a compiler raises is this variant's result
            yield {**row, "complaint": f"does not compile: {type(error).__name__}: {error}"}
            continue
        yield {**row, **resources._asdict(), "complaint": resources.complaint(architecture)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="of hf_wsvd.kernels; default: all that list variants")
    parser.add_argument("--architectures", type=int, nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--covering", action="store_true", help="a covering few for sm_90, fewer for others")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("INDEX", "COUNT"), help="of the work")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # before a kernel module is imported: interpreted kernels do not compile
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        plan = []
        for module in arguments.modules or kernel_modules():
            listed = variants_of(module)
            few = covering_plan(listed) if arguments.covering else full_plan(listed, arguments.architectures)
            plan += [(module, variant, architecture) for variant, architecture in few]
        for row in check(plan[arguments.share[0] :: arguments.share[1]]):
            failed |= row["complaint"] is not None
            print(json.dumps(row) if arguments.json else _line(row), flush=True)
    sys.exit(failed)


def _line(row: dict[str, object]) -> str:
    head = f"{row['module']} sm_{row['architecture']} {row['variant']}: "
    taken = f"{row['registers']} registers, {row['shared']} bytes shared" if "registers" in row else ""
    return head + ", ".join(filter(None, [taken, row["complaint"]]))


if __name__ == "__main__":
    main()
