"""Scores of pairs whose similarities are negative, alone and in a batch with longer texts."""

import torch
from bert_score.utils import greedy_cos_idf


def scores(lengths, dim=8):
    """(P, R, F) of pairs of texts with these lengths, whose similarities are all negative."""
    generator = torch.Generator().manual_seed(0)
    longest = max(lengths)
    texts = []
    for sign in (1.0, -1.0):
        states = torch.full((len(lengths), longest, dim), 2.0)  # what bert-score pads with
        for i, length in enumerate(lengths):
            states[i, :length] = sign * (torch.rand(length, dim, generator=generator) + 0.1)
            generator.manual_seed(i + 1)  # the same text, whatever follows it
        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
        texts += [states, mask, mask.float()]
        generator.manual_seed(0)
    return greedy_cos_idf(*texts)


def test_a_score_does_not_depend_on_the_batch():
    alone, together = scores([3]), scores([3, 5])
    assert alone[0][0] < 0 and alone[1][0] < 0
    for one, many in zip(alone, together, strict=True):
        torch.testing.assert_close(one[0], many[0])
        assert many.isfinite().all()
