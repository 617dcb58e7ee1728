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
    "max_predictions": 5,
    "seed": 7,
}


def test_equals_the_op():
    ids = torch.randint(5, 50, (4, 20))
    maskable = torch.rand(4, 20) < 0.8
    index = torch.tensor([3, 1, 4, 159])
    masker = TokenMasker(50, 4, **SETTINGS)
    out = masker(ids, maskable, index, step=2)
    expected = ops.mask_tokens(
        ids,
        vocab_size=50,
        mask_token_id=4,
        maskable=maskable,
        sample_index=index,
        step=2,
        **SETTINGS,
    )
    for ours, theirs in zip(out, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_matters(setting):
    ids = torch.randint(5, 50, (4, 20))
    other = {**SETTINGS, setting: 1 if isinstance(SETTINGS[setting], int) else 0.1}
    ours, theirs = TokenMasker(50, 4, **SETTINGS)(ids), TokenMasker(50, 4, **other)(ids)
    assert not torch.equal(ours.input_ids, theirs.input_ids)
