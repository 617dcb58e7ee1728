"""What the folder of a sentence-transformers model says of ``embed``'s arguments.

Each field of its files is obeyed, or changes nothing in ``SentenceTransformer.encode(texts)``, or
is refused by its name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastplm.errors import DataError, check
from fastplm.models._base import most_positions
from fastplm.run.checkpoint import config_at
from fastplm.run.folder import loaded

_WHERE = "embed"
#: {what sentence-transformers calls a pooling: (the switch in files of older versions, ours)}, in
#: the order in which the vectors of several switches follow each other.
_POOLINGS = {
    "cls": ("pooling_mode_cls_token", "cls"),
    "max": ("pooling_mode_max_tokens", "max"),
    "mean": ("pooling_mode_mean_tokens", "mean"),
    "mean_sqrt_len_tokens": ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len"),
    "weightedmean": ("pooling_mode_weightedmean_tokens", "weighted_mean"),
    "lasttoken": ("pooling_mode_lasttoken", "last"),
}
#: The file of a Transformer was once named after its model; the first one that says something
#: counts.
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_ANY, _NOTHING = object(), object()
_STATES = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
#: {module: {field: its only value, beside null, false and empty ones}}. A field that may have any
#: value is obeyed below, or belongs to training, speed, prompts or ``encode_query`` alone.
_FIELDS: dict[str, dict[str, Any]] = {
    "Transformer": {
        "max_seq_length": _ANY,
        "transformer_task": "feature-extraction",
        "modality_config": _STATES,
        "module_output_name": "token_embeddings",
        "unpad_inputs": _ANY,
        "query_length": _ANY,
        "document_length": _ANY,
        "query_expansion": _ANY,
    },
    "Pooling": {
        "pooling_mode": _ANY,
        **{switch: _ANY for switch, _ in _POOLINGS.values()},
        "embedding_dimension": _ANY,
        "word_embedding_dimension": _ANY,
        "include_prompt": _ANY,
    },
    "Normalize": {
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
    },
    "Dropout": {"dropout": _ANY},
}
_EXPECTED = "Transformer, Pooling and Normalize of sentence-transformers, and vectors of them alone"
#: Encoder-decoders of which sentence-transformers computes the encoder, as ``embed`` does.
_ENCODERS = ("t5", "mt5", "umt5")


def sentence_transformers_settings(folder: str | Path) -> dict[str, Any] | None:
    """What a checkpoint of sentence-transformers says of ``embed``'s arguments.

    Args:
        folder: of the checkpoint, with ``modules.json``.

    Returns:
        ``pooling``, ``normalize`` and ``max_length``; None if there is no ``modules.json``.

    Raises:
        DataError: a file is damaged, or asks for what ``embed`` does not compute.
    """
    folder = Path(folder)
    if not (folder / "modules.json").is_file():
        return None
    found: dict[str, Any] = {"pooling": (), "normalize": False, "max_length": None}
    refused: list[str] = []
    kinds = []
    for module in _read(folder / "modules.json", list):
        package, _, kind = str(module["type"]).rpartition(".")
        if kind not in _FIELDS or package.partition(".")[0] != "sentence_transformers":
            refused.append(module["type"])
            continue
        kinds.append(kind)
        path = folder / str(module["path"])
        names = _TRANSFORMER_FILES if kind == "Transformer" else ("config.json",)
        fields: dict[str, Any] = next(
            filter(None, (_read(path / name, dict) for name in names)), {}
        )
        if kind == "Transformer":
            found["max_length"] = fields.get("max_seq_length")
            refused += [] if path.resolve() == folder.resolve() else [f"{kind}.path"]
        elif kind == "Pooling":
            switches = [name for name, (switch, _) in _POOLINGS.items() if fields.get(switch)]
            modes = fields.get("pooling_mode", switches or ["mean"])
            modes = [modes] if isinstance(modes, str) else modes
            able = isinstance(modes, list) and {*map(str, modes)} <= _POOLINGS.keys()
            refused += [] if able and modes and fields else [f"{kind}.pooling_mode={modes}"]
            found["pooling"] = tuple(_POOLINGS[mode][1] for mode in modes if able)
        found["normalize"] |= kind == "Normalize"
        allowed = _FIELDS[kind]
        refused += [
            f"{kind}.{field}={value!r:.60}"
            for field, value in fields.items()
            if value and allowed.get(field, _NOTHING) not in (_ANY, value)
        ]
    in_order = kinds[:2] == ["Transformer", "Pooling"] and not {*kinds[2:]} & {*kinds[:2]}
    refused += [] if in_order else [f"{' and '.join(kinds)} in this order"]
    refused += _of_encode(_read(folder / "config_sentence_transformers.json", dict))
    config = config_at(_WHERE, "model", folder)
    decodes = config.is_encoder_decoder and config.model_type not in _ENCODERS
    refused += [f"the decoder of {config.model_type}"] if decodes else []
    longest = found["max_length"]
    if longest is not None:
        numeric = type(longest) is int and longest > 0
        refused += [] if numeric else [f"Transformer.max_seq_length={longest!r}"]
        found["max_length"] = min(longest, most_positions(config) or longest) if numeric else None
    got = f"{folder}, whose files ask for {' and '.join(refused)}"
    fix = "Use sentence-transformers, or name --pooling: then its files are not read."
    check(not refused, _WHERE, "model", got, _EXPECTED, fix, DataError)
    return found


def _of_encode(fields: dict[str, Any]) -> list[str]:
    """What config_sentence_transformers.json asks of ``encode`` that ``embed`` does not do.

    The similarity is what ``model.similarity`` computes of vectors, and changes none.
    """
    name = fields.get("default_prompt_name")
    prompts = {None: None, "query": None, "document": None, **(fields.get("prompts") or {})}
    refused = [f"default_prompt_name={name!r}"] if prompts.get(name, "no such prompt") else []
    others = {"model_type": "SentenceTransformer", "truncate_dim": None, "requirements": None}
    return refused + [
        f"{field}={fields[field]!r:.60}"
        for field, only in others.items()
        if fields.get(field, only) not in (only, {})
    ]


def _read(path: Path, kind: type) -> Any:
    """What a file holds, a list of modules or fields by name; nothing if there is no file."""

    def parse() -> Any:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else kind()
        every = content if kind is list else []
        if not isinstance(content, kind) or any({"type", "path"} - {*each} for each in every):
            raise TypeError(f"no {kind.__name__} of what belongs there")
        return content

    return loaded(_WHERE, "model", path, "a file of sentence-transformers", parse)
