"""Drop-in models: subclasses of the Transformers classes of the same names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastplm.models.bert import BertForMaskedLM, BertForPreTraining, BertModel
    from fastplm.models.electra import ElectraForMaskedLM, ElectraForPreTraining
    from fastplm.models.electra_joint import (
        ElectraForJointPreTraining,
        ElectraJointConfig,
        ElectraJointOutput,
    )

__all__ = [
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertModel",
    "ElectraForJointPreTraining",
    "ElectraForMaskedLM",
    "ElectraForPreTraining",
    "ElectraJointConfig",
    "ElectraJointOutput",
]


def __getattr__(name: str) -> Any:
    # Transformers takes seconds to import, so a family is imported when it is first asked for.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family = "bert" if name.startswith("Bert") else "electra"
    if "Joint" in name:
        family = "electra_joint"
    return getattr(importlib.import_module(f"{__name__}.{family}"), name)


def __dir__() -> list[str]:
    return __all__
