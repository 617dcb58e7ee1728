"""nn.TokenMasker holds the settings of ops.mask_tokens, and passes all of them on."""

from __future__ import annotations

import pytest
import torch

from fastplm import ops
from fastplm.nn import TokenMasker

SETTINGS = {
    "mlm_probability": 0.4,
    "mask_replace_prob": 0.5,
    "random_replace_prob": 0.25,
    "max_predictions": 8,
    "special_ids": (7, 9, 30),
    "sampling": "exact",
    "unit": "ngram",
    "max_ngram": 3,
    "seed": 7,
}
OTHERS = {
    "special_ids": range(5, 40),
    "sampling": "bernoulli",
    "unit": "word",
    "max_ngram": 8,
    "max_predictions": 1,
    "seed": 1,
}
WORDS = torch.arange(20).expand(4, 20) // 2


def test_equals_the_op():
    ids = torch.randint(5, 50, (4, 20))
    maskable = torch.rand(4, 20) < 0.8
    index = torch.tensor([3, 1, 4, 159])
    masker = TokenMasker(50, 4, **SETTINGS)
    out = masker(ids, maskable, index, step=2, word_ids=WORDS)
    expected = ops.mask_tokens(
        ids,
        vocab_size=50,
        mask_token_id=4,
        maskable=maskable,
        sample_index=index,
        step=2,
        word_ids=WORDS,
        **SETTINGS | {"special_ids": torch.tensor(SETTINGS["special_ids"])},
    )
    for ours, theirs in zip(out, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_matters(setting):
    ids = torch.randint(5, 50, (4, 20))
    other = SETTINGS | {setting: OTHERS.get(setting, 0.1)}
    ours, theirs = TokenMasker(50, 4, **SETTINGS), TokenMasker(50, 4, **other)
    assert any(  # in one step both may draw the same
        not torch.equal(*(one(ids, step=step, word_ids=WORDS).input_ids for one in (ours, theirs)))
        for step in range(8)
    )


def test_packed_rows():
    ids = torch.randint(5, 50, (4, 20))
    ends = torch.arange(0, 81, 20, dtype=torch.int32)
    settings = SETTINGS | {"max_predictions": 3}
    masker = TokenMasker(50, 4, **settings)
    padded = masker(ids, word_ids=WORDS)
    packed = masker(ids.flatten(), word_ids=WORDS.flatten(), cu_seqlens=ends)
    for ours, theirs in zip(packed, padded, strict=True):
        assert torch.equal(ours.flatten(), theirs.flatten())


def test_special_ids_move_with_the_module_and_are_not_saved():
    masker = TokenMasker(50, 4, special_ids=(9, 7, 9))
    assert masker.special_ids.tolist() == [7, 9] and not masker.state_dict()
