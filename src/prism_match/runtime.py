"""onnxruntime, opened the one way that this package opens it: on the CPU, and in silence."""

from __future__ import annotations

import os
from typing import Any

import torch

from prism_match.errors import UserError

INSTALL = 'pip install "prism-match[onnx]"'


def import_onnxruntime() -> Any:
    # Its builds tell Microsoft of each session unless this is set before it is imported.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise UserError(f"onnxruntime is missing: {INSTALL}") from error
    except ImportError as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"onnxruntime cannot be loaded ({reason}): {INSTALL}") from error
    return onnxruntime


def open_session(model: bytes | str, name: str) -> Any:
    """With as many threads as PyTorch has. model: a graph, or the path of one; name: what errors call it."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Its threads do not keep the CPU busy while they wait, for PyTorch's have work then.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # It would keep what the largest images took: half as much memory again, for two per cent of the time.
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 4  # what goes wrong is raised, too
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # it has no common type for what may be wrong
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{name}: cannot be opened by onnxruntime ({reason})") from error
