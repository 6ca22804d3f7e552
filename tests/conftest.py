"""What all tests share. Triton's own functions decide at import whether they are interpreted, so the choice is made
here, before anything imports it: interpreted on machines without an NVIDIA device."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
