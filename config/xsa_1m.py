# Is the own value special? Its removal against two controls of the same amount, at two learning rates.
#
# self_value_1m found self - baseline -0.021 and self - rotated undecided, with 8 seeds, at one rate, and `rotated`
# removes 3% of a head's output energy where the own value is 22%. Here 16 fresh seeds, and two controls that take
# exactly as much: `matched` along another direction, `shrink` along none. NoDiag forbids attention to the own position,
# the obvious other way to keep a head from repeating it.
#
# What each verdict answers:
#   self - baseline      lower: removal helps at that rate (predicted at 1e-3; open at 3e-3).
#   the interaction      (self - baseline at 1e-3) - (the same at 3e-3). lower: the gain is larger at the smaller rate,
#                        so at least part of it is a head start that a better rate replaces. equivalent: the gain does
#                        not depend on which of the two rates. higher: the better rate makes more of it.
#   self - matched       lower: the own value's direction matters, beyond how much is removed. equivalent: any
#                        direction does. higher: the own value is the worse one to remove.
#   self - shrink        lower: a direction must be removed, a smaller output is not enough. equivalent: it is.
#   NoDiag - self        lower or equivalent: forbidding attention to oneself does as well, with no removal.
#   NoDiag - baseline    at 3e-3. lower: the rival helps at the better rate.
# Undecided is an answer too: 16 seeds find about 0.011 nats here, given the spread of self_value_1m (sd 0.011).
#
# Shape and training as in residual_1m.py, but for the rate.

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

_removals = {name: {"removal": name} for name in ("self", "matched", "shrink")}
_kinds = {"baseline": {}} | _removals | {"NoDiag": {"self_bias": -30.0}}
_rates = {"1e-3": 1e-3, "3e-3": 3e-3}
arms = {
    f"{kind}@{name}": flags | {"learning_rate": rate, "min_lr": rate / 10}
    for name, rate in _rates.items()
    for kind, flags in _kinds.items()
}
seeds = range(120, 136)
contrasts = [  # with what is predicted, in nats
    ("self@1e-3", "baseline@1e-3", (None, 0)),
    ("self@3e-3", "baseline@3e-3"),
    (("self@1e-3", "baseline@1e-3"), ("self@3e-3", "baseline@3e-3")),
    ("self@1e-3", "matched@1e-3"),
    ("self@1e-3", "shrink@1e-3"),
    ("NoDiag@1e-3", "self@1e-3"),
    ("NoDiag@3e-3", "baseline@3e-3"),
]
margin = 0.01  # nats; ours
