"""What libraries print: their false alarms are silenced here, one by one and by name; their warnings stay."""

from __future__ import annotations

import logging
import os
import warnings

HARMLESS = (
    # TRL's own calls of what it deprecates, and notes for authors of trainers.
    r".*return_outputs=True.*",
    # Emitted for every CPU run: there is no memory to pin.
    r".*'pin_memory' argument is set as true but no accelerator is found.*",
    # Transformers and PEFT among themselves: a name that one has changed and the other still uses.
    r".*is_gradient_checkpointing. is deprecated.*",
    # bitsandbytes on CPU computes through PyTorch where an optional kernel is not installed.
    r".*MatMul8bitLt.*",
    # DeepSpeed's calls of what PyTorch renames.
    r".*_into_tensor` is deprecated.*",
    r".*reduce_scatter_tensor` is deprecated.*",
)


class _Without(logging.Filter):
    """Drops records that hold one of the given texts."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(text in message for text in self.texts)


def quiet(*, main: bool) -> None:
    """Set up logging before libraries are imported: rank 0 shows warnings, the others errors alone."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if main else "error")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # A lost process is named by the watch; PyTorch would show forty frames of C++ for each connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the workspace: nothing may reach out
    for pattern in HARMLESS:
        warnings.filterwarnings("ignore", message=pattern)
    if not main:
        warnings.filterwarnings("ignore")
    # Kernels of torchao for GPUs that this machine does not have, and its enums, which PyTorch now knows by itself.
    logging.getLogger("torchao").addFilter(_Without("Could not load this library", "Failed to load"))
    logging.getLogger("torch.utils._pytree").addFilter(_Without("is an Enum subclass"))
    # A faster kernel for 4-bit weights on CPU is not installed; the result is the same.
    # torchao looks for kernels of GPUs and Pythons that are not here, and for a newer way to name a constant.
    logging.getLogger("torchao").addFilter(_Without("Failed to load"))
    logging.getLogger("torch.utils._pytree").addFilter(_Without("register_constant"))
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_Without("gemm_4bit_forward"))
