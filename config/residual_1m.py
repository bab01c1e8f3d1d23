# Study A at 0.8M parameters: which residual path of a Pre-LN GPT matters more?
#
# Answers to (arXiv 2608.14689, nats per token, mean ± sd): at 10M, 8 seeds, AttnOnly 1.580 ± 0.003 and FFNOnly
# 3.350 ± 0.002; at 124M, 5 seeds, FullResidual 4.577 ± 0.012, AttnOnly 6.037 ± 0.355, FFNOnly 7.569 ± 0.001. Those are
# other scales: what carries over is the order of the arms and that FFNOnly ends at the unigram reference.
#
# The shape is nanoGPT's for a CPU (its README reports about 1.88 nats for the full model). Its choice, not the paper's:
# every setting below. Our choice: 8 seeds as in the 10M study, the margin.

dataset = "shakespeare"  # python prepare.py shakespeare
n_layer, n_head, n_embd = 4, 4, 128
block_size = 64
bias = False
dropout = 0.0
batch_size = 12
max_iters = 2000
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
seeds = range(200, 208)  # fresh: the first set, of seeds 0 to 7, is in results/first/
contrasts = [  # with what is predicted of each, in nats
    ("FFNOnly", "AttnOnly", (0, None)),
    ("AttnOnly", "FullResidual", (0, None)),
    ("NoResidual", "FFNOnly", (-0.02, 0.02)),
    ("FFNOnly", "unigram", (-0.02, 0.02)),
]
margin = 0.02  # nats; ours
