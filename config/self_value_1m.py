# Study B's training test at 0.8M parameters, with the control that it lacks.
#
# Answers to (50.9M parameters, 8 paired seeds, nats per token): fixed − baseline +0.0011, p = 0.197; self − baseline
# −0.0029, Holm p = 0.0023; self − fixed −0.0040, p = 0.0018. Another scale, corpus and length: only the questions carry
# over. What the fixed direction can't tell is whether the own value helps, or any direction that depends on the token:
# `rotated` removes the own value turned by a fixed random rotation, so self − rotated asks just that. `previous`
# removes the value of the previous token, which adds a path from that token: it is reported beside the controls and
# is none. Shape and training as in residual_1m.py: our choice.

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
    "baseline": {},
    "self": {"removal": "self"},
    "fixed": {"removal": "fixed"},
    "rotated": {"removal": "rotated"},
    "previous": {"removal": "previous"},
}
seeds = range(8)
contrasts = [
    ("self", "baseline"),
    ("fixed", "baseline"),
    ("self", "fixed"),
    ("self", "rotated"),
]
margin = 0.002  # nats; ours: below the effect that study B reports
