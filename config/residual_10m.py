# Study A at 10M parameters, the deterministic sweep.
#
# Answers to (arXiv 2608.14689, nats per token, mean ± sd over 8 seeds): AttnOnly 1.580 ± 0.003, FFNOnly 3.350 ± 0.002,
# NoResidual in the regime that FFNOnly reaches. The published abstract gives no shape. Our choice: nanoGPT's character
# level Shakespeare model (6 layers, 6 heads, width 384, context 256), whose unigram reference is 3.3473 nats, and its
# training settings.

dataset = "shakespeare"  # python prepare.py shakespeare
n_layer, n_head, n_embd = 6, 6, 384
block_size = 256
bias = False
dropout = 0.2
batch_size = 64
max_iters = 5000
learning_rate, min_lr = 1e-3, 1e-4
warmup_iters = 100
beta1, beta2 = 0.9, 0.99
eval_interval = 250

arms = {
    "FullResidual": {},
    "AttnOnly": {"ffn_residual": False},
    "FFNOnly": {"attn_residual": False},
    "NoResidual": {"attn_residual": False, "ffn_residual": False},
}
seeds = range(8)
contrasts = [
    ("FFNOnly", "AttnOnly"),
    ("AttnOnly", "FullResidual"),
    ("NoResidual", "FFNOnly"),  # predicted: equivalent
    ("FFNOnly", "unigram"),  # predicted: equivalent
]
margin = 0.02  # nats; ours
