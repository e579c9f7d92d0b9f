"""Before any library is imported: no network, no telemetry, no windows, one thread for each of the tests' workers."""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")
