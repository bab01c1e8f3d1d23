# Is the loss of AttnOnly that of its learning rate, and does any rate rescue FFNOnly? Tuned against tuned, at 0.8M.
#
# The arms of residual_1m at four rates each, with min_lr a tenth of the rate. Of each family the first two seeds choose
# the rate, and the contrast is computed on the other four. Every setting beside the rates is that of residual_1m.

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

_kept = {"FullResidual": (True, True), "AttnOnly": (True, False)}
_kept |= {"FFNOnly": (False, True), "NoResidual": (False, False)}
_rates = {"3e-4": 3e-4, "1e-3": 1e-3, "3e-3": 3e-3, "1e-2": 1e-2}
arms = {
    f"{arm}@{name}": {"attn_residual": attn, "ffn_residual": ffn, "learning_rate": rate, "min_lr": rate / 10}
    for arm, (attn, ffn) in _kept.items()
    for name, rate in _rates.items()
}
seeds = range(6)
tune_seeds = 2
contrasts = [  # with what is predicted, in nats
    ("AttnOnly@*", "FullResidual@*", (0, None)),
    ("FFNOnly@*", "AttnOnly@*", (0, None)),
    ("FFNOnly@*", "unigram"),
    ("NoResidual@*", "FFNOnly@*"),
]
margin = 0.02  # nats; ours
