# The collapse, in minutes on a laptop: `make demo`.
#
# A toy of study A (arXiv 2608.14689): without the attention residual a Pre-LN GPT learns letter frequencies and nothing
# else. What carries over from the paper is the order of the arms, no number. Every setting is our choice: the smallest
# model that shows it safely in a minute or two, on text that is inside every Python.

dataset = "pydocs"  # python prepare.py pydocs
n_layer, n_head, n_embd = 4, 4, 64
block_size = 64
bias = False
dropout = 0.0
batch_size = 12
max_iters = 600
learning_rate, min_lr = 1e-3, 1e-5
warmup_iters = 100
beta1, beta2 = 0.9, 0.99
eval_interval = 150

arms = {
    "FullResidual": {},
    "AttnOnly": {"ffn_residual": False},
    "FFNOnly": {"attn_residual": False},
    "NoResidual": {"attn_residual": False, "ffn_residual": False},
}
seeds = range(3)
contrasts = [  # with what is predicted of each, in nats
    ("FFNOnly", "AttnOnly", (0, None)),
    ("AttnOnly", "FullResidual", (0, None)),
    ("NoResidual", "FFNOnly", (-0.02, 0.02)),
    ("FFNOnly", "unigram", (-0.02, 0.02)),
]
margin = 0.02  # nats; ours
