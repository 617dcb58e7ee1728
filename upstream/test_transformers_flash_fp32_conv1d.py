"""GPT-2 in fp32 under flash attention, whose kernel is PyTorch's function here."""

import pytest
import torch
import transformers
from transformers import modeling_flash_attention_utils as flash


def dense(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """flash_attn_func for q, k and v [B, T, H, D]."""
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(
        *rows, is_causal=causal, scale=softmax_scale
    ).transpose(1, 2)


@pytest.fixture
def flash_on_cpu(monkeypatch):
    functions = (dense, dense, None, flash._pad_input, flash._unpad_input)
    process = flash._lazy_define_process_function(dense)
    monkeypatch.setattr(
        flash, "lazy_import_flash_attention", lambda *args, **kwargs: (functions, (process, None))
    )


def test_gpt2_in_fp32_equals_its_eager_attention(flash_on_cpu):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager"
    )
    model = transformers.GPT2Model(config).eval()
    ids = torch.randint(50, (2, 9))
    with torch.no_grad():
        eager = model(input_ids=ids, use_cache=False).last_hidden_state
        model.config._attn_implementation_internal = "flash_attention_2"  # unchecked: no GPU
        try:
            found = model(input_ids=ids, use_cache=False).last_hidden_state
        except StopIteration:
            raise AssertionError("no linear layer was found") from None
    torch.testing.assert_close(found, eager)
