"""TEMPORARY stand-in by the lead until the model helper's file lands: overwrite freely."""
import torch
from transformers import LlamaConfig, LlamaForCausalLM
SIZES = {"tiny": (2, 64, 176, 2)}
def parameter_count(size, vocab): return sum(p.numel() for p in build_model("tiny", vocab=vocab, length=8, seed=0).parameters())
def build_model(name, *, vocab, length, seed, dtype=torch.float32):
    l, d, f, h = SIZES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=d, intermediate_size=f, num_hidden_layers=l, num_attention_heads=h, num_key_value_heads=h, max_position_embeddings=max(length, 128), use_cache=False, attn_implementation="sdpa"))
def load_pretrained(path, *, vocab, length): raise NotImplementedError
def export_model(model, directory): model.save_pretrained(directory)
def next_token_loss(model, tokens):
    logits = model(input_ids=tokens[:, :-1].long()).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten().long())
