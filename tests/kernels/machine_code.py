"""What machine code of NVIDIA's GPUs says: registers that do not suffice, the length of loops, and
whether a matrix product's left operand is overwritten while it is still read."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field

import triton

# Instructions whose first operand is read, or that write no register.
READING = (
    *("ST", "RED", "BAR", "BRX", "CALL", "CCTL", "JMX", "NANOSLEEP", "R2P", "R2UR", "RET", "SUST"),
    *("WARPSYNC", "SYNCS", "UTMA", "BMOV.32.PQUAD", "VOTEU"),
)
# Instructions that may write a predicate before their register.
PREDICATE_FIRST = ("ATOM", "LOP3", "MATCH", "SHFL")
# Registers that an instruction writes, by parts of its name; one where no part is named.
WRITTEN = {
    ".128": 4,
    ".64": 2,
    ".WIDE": 2,
    "HMMA.": 4,
    "IMMA.": 4,
    "DFMA": 2,
    "DADD": 2,
    "DMUL": 2,
    "CS2R.32": 1,
    "CS2R": 2,
    ".F64": 2,
    ".M88.4": 4,
    ".MT88.4": 4,
    ".M88.2": 2,
    ".MT88.2": 2,
}
ASYNCHRONOUS = re.compile(r"(?:HGMMA|IGMMA|QGMMA)\.64x(\d+)x\d+")
LEFT = 4  # registers of the left operand
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
INSTRUCTION = re.compile(
    r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P\d|U?PT)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)


@dataclass
class Instruction:
    """One of a function, with the ones that may follow it, by number."""

    predicated: bool
    name: str
    operands: list[str]
    text: str
    next: list[int] = field(default_factory=list)

    @property
    def written(self) -> range:
        """The registers that it writes, at least: more rather than fewer."""
        if self.name.startswith(READING):
            return range(0)
        place = int(self.name.startswith(PREDICATE_FIRST) and self.operands[0].startswith("P"))
        first = re.match(r"R(\d+)\b", self.operands[place]) if self.operands else None
        if first is None:
            return range(0)
        if product := ASYNCHRONOUS.match(self.name):
            count = int(product[1]) // 2  # float32 or int32, 64 rows over 128 threads
        else:
            count = next((n for part, n in WRITTEN.items() if part in self.name), 1)
        return range(int(first[1]), int(first[1]) + count)

    @property
    def left(self) -> range | None:
        """The registers of an asynchronous product's left operand; None of what is none, or has it
        in shared memory."""
        if not ASYNCHRONOUS.match(self.name):
            return None
        register = re.match(r"R(\d+)\b", self.operands[1])
        return register and range(int(register[1]), int(register[1]) + LEFT)


def parse(disassembly: str) -> list[Instruction]:
    """The instructions of nvdisasm's output, in order, each with its successors."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in disassembly.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif match := INSTRUCTION.match(line):
            operands = [text.strip() for text in match[3].split(",")] if match[3] else []
            always = match[1] in (None, "PT", "UPT")
            found.append(Instruction(not always, match[2], operands, line.strip()))
    for number, one in enumerate(found):
        target = re.search(r"\((\.L_x_\d+)\)", one.text) if "BRA" in one.name else None
        conditional = one.predicated or (one.name.startswith("BRA") and len(one.operands) > 1)
        if target and labels.get(target[1], len(found)) < len(found):
            one.next.append(labels[target[1]])
        ends = one.name.startswith(("EXIT", "RET", "KILL", "BRA"))
        if (conditional or not ends) and number + 1 < len(found):
            one.next.append(number + 1)
    return found


def overwritten(disassembly: str) -> list[str]:
    """The instructions that may write a register of an asynchronous product's left operand before
    the wait for that product, each after the product. Empty: the code is right.

    ptxas may give such registers to later instructions too early (triton PR#11781).
    """
    code, wrong = parse(disassembly), []
    for number, product in enumerate(code):
        if (left := product.left) is None:
            continue
        # A product's group is complete once a wait lets fewer later groups be in flight.
        todo = [(number, 0)]
        seen = set(todo)
        while todo:
            at, groups = todo.pop()
            groups += "gsb0" in code[at].operands and ASYNCHRONOUS.match(code[at].name) is not None
            for follower in code[at].next:
                wait, one = WAIT.search(code[follower].text), code[follower]
                if wait and groups > int(wait[1], 16):
                    continue
                if {*left} & {*one.written}:
                    wrong.append(f"{product.text} -> {one.text}")
                elif (follower, groups) not in seen and groups < 8:
                    seen.add((follower, groups))
                    todo.append((follower, groups))
    return wrong


def tool_output(tool: str, option: str, binary: bytes) -> str:
    """What a tool of CUDA's says of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run(
            [tool, option, file.name], capture_output=True, text=True, check=True
        ).stdout


def disassembled(binary: bytes) -> str:
    """The machine code in words."""
    return tool_output(triton.knobs.nvidia.nvdisasm.path, "-c", binary)


def spilled(binary: bytes) -> int:
    """Bytes of a thread's stack."""
    found = re.search(
        r"STACK:(\d+)", tool_output(triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary)
    )
    assert found
    return int(found[1])


def longest_loop(disassembly: str) -> int:
    """Instructions from the target of a branch backwards to the branch, those of loops within it
    included."""
    count, longest, labels = 0, 0, dict[str, int]()
    for line in disassembly.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            count += 1
            if (branch := re.search(r"BRA.*\((\.L_x_\d+)\)", line)) and branch[1] in labels:
                longest = max(longest, count - labels[branch[1]])
    return longest
