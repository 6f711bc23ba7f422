"""What the system says of the processor. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def cpu_info(names: str) -> str:
    """What Linux says of the first processor; "" where it says nothing, and on other systems.

    Args:
        names: of the field, as it is called on different processors, such as "flags|Features".
    """
    try:
        text = CPU_INFO.read_text()
    except OSError:
        return ""
    found = re.search(rf"^({names})[ \t]*:(.*)$", text, re.MULTILINE)
    return found.group(2).strip() if found else ""
