"""Cross-attention by flash attention where the source is padded; its kernel is a loop here."""

import pytest
import torch
import transformers
from transformers import modeling_flash_attention_utils as flash


def varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
):
    """flash_attn_varlen_func for q [Nq, H, D], k and v [Nk, H, D], text by text."""
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    assert len(cu_seqlens_q) == len(cu_seqlens_k) and cu_seqlens_q[-1] == len(q)
    out = torch.zeros_like(q)
    for i in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        keys = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        query, key, value = (x.transpose(0, 1) for x in (q[rows], k[keys], v[keys]))
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool)
        if causal:
            mask = mask.tril(key.shape[1] - query.shape[1])
        out[rows] = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=softmax_scale
        ).transpose(0, 1)
    return out


def dense(q, k, v, **kwargs):
    """flash_attn_func, for batches without padding."""
    ends = [torch.arange(len(q) + 1, dtype=torch.int32) * x.shape[1] for x in (q, k)]
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    return varlen(*rows, *ends, q.shape[1], k.shape[1], **kwargs).view(q.shape)


@pytest.fixture
def flash_on_cpu(monkeypatch):
    functions = (dense, varlen, None, flash._pad_input, flash._unpad_input)
    process = flash._lazy_define_process_function(varlen)
    monkeypatch.setattr(
        flash, "lazy_import_flash_attention", lambda *args, **kwargs: (functions, (process, None))
    )


@pytest.mark.parametrize("target_length", [1, 4, 6, 9])
def test_bart_equals_its_eager_attention(flash_on_cpu, target_length):
    """Shorter than the source, as long, and longer."""
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=50,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=20,
        init_std=0.5,
        attn_implementation="eager",
    )
    model = transformers.BartModel(config).eval()
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    inputs = {
        "input_ids": torch.randint(5, 50, mask.shape),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(5, 50, (3, target_length)),
        "use_cache": False,
    }
    with torch.no_grad():
        eager = model(**inputs)
        model.config._attn_implementation_internal = "flash_attention_2"  # unchecked: no GPU
        found = model(**inputs)
    real = mask.bool()
    torch.testing.assert_close(
        found.encoder_last_hidden_state[real], eager.encoder_last_hidden_state[real]
    )
    torch.testing.assert_close(found.last_hidden_state, eager.last_hidden_state)
