# Does any learning rate rescue FFNOnly, and is the loss of AttnOnly that of its rate? Tuned against tuned, at 0.8M.
#
# Three arms of residual_1m, and Help250 of basin_1m (attention to the own position, gone by step 250), at four rates
# each, with min_lr a tenth of the rate. Of each family the first two seeds choose the rate, and the contrast is
# computed on the other four. FFNOnly - unigram is an open question, so nothing is predicted of it: well below 0 at the
# best rate would say that the collapse is one of the learning rate.
#
# Shape and training as in residual_1m.py, but for the rate; seeds that no experiment here has used.

dataset = "shakespeare"  # python prepare.py shakespeare
n_layer, n_head, n_embd = 4, 4, 128
block_size = 64
bias = False
dropout = 0.0
batch_size = 12
max_iters = 2000
warmup_iters = 100
beta1, beta2 = 0.9, 0.99
eval_interval = 250
dtype, compile = "float32", False  # so that any machine can go on with it

_kinds = {
    "FullResidual": {},
    "AttnOnly": {"ffn_residual": False},
    "FFNOnly": {"attn_residual": False},
    "Help250": {"attn_residual": False, "self_bias": ((0, 4.0), (250, 0.0))},
}
_rates = {"3e-4": 3e-4, "1e-3": 1e-3, "3e-3": 3e-3, "1e-2": 1e-2}
arms = {
    f"{kind}@{name}": flags | {"learning_rate": rate, "min_lr": rate / 10}
    for kind, flags in _kinds.items()
    for name, rate in _rates.items()
}
seeds = range(140, 146)
tune_seeds = 2
contrasts = [  # with what is predicted, in nats
    ("AttnOnly@*", "FullResidual@*", (0, None)),
    ("Help250@*", "FullResidual@*", (0, None)),
    ("FFNOnly@*", "AttnOnly@*", (0, None)),
    ("FFNOnly@*", "unigram"),
]
margin = 0.02  # nats; ours
