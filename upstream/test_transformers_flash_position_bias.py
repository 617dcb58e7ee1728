"""T5 under flash attention: right, or refused. Its kernel is PyTorch's function here."""

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


def test_t5_is_not_run_without_its_bias(flash_on_cpu):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        attn_implementation="eager",
    )
    model = transformers.T5EncoderModel(config).eval()
    ids = torch.randint(2, 50, (2, 9))
    with torch.no_grad():
        eager = model(input_ids=ids).last_hidden_state
        # As with the name of a repository of kernels, for which `_supports_flash_attn` is not read.
        model.config._attn_implementation_internal = "flash_attention_2"
        try:
            found = model(input_ids=ids).last_hidden_state
        except ValueError as error:
            assert "position_bias" in str(error)
        else:
            torch.testing.assert_close(found, eager)
