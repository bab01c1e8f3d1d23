# Does a model need the attention residual to run, or only to start?
#
# Without it FFNOnly stays at the unigram reference. Attention to the own position (self_bias=4) prevents that, as
# routing_1m found. Here the help is taken away again: a bias that falls from 4 to 0 by step 50, 250 or 1,000, after
# which the arm is FFNOnly exactly.
#
# If the path carries what the model can't do without, the helped arms fall back to unigram once the help has gone.
# If the plain arm is only stuck at its start, they stay below it. The second is predicted of Help250, Help1000 and
# NoResidual+Help1000, by more than 0.5 nats; an end at unigram would refute it. Open questions, with nothing predicted:
#   Help50     how little help is enough?
#   Late250    does the help of Help250 still work, once the plateau is reached?
#   LateBias4  does help that stays still work then?
#   Help1000 - Bias4, Late250 - Help250: what does help cost, or lose, by its time?
# Value keeps what the path carries and cuts its gradient: lower than FFNOnly by 0.5 under either answer, as the last
# layer then has the token at hand; if it is not, what is missing is the gradient. Help1000 - FullResidual is what the
# path is worth once training has begun: above 0.
#
# Shape and training as in residual_1m.py; seeds that no experiment here has used.

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
eval_interval = 125
dtype, compile = "float32", False  # so that any machine can go on with it

_ffn_only = {"attn_residual": False}
arms = {
    "FullResidual": {},
    "FFNOnly": _ffn_only,
    "Value": {"attn_residual": "value"},
    "Bias4": _ffn_only | {"self_bias": 4.0},
    "Help50": _ffn_only | {"self_bias": ((0, 4.0), (50, 0.0))},
    "Help250": _ffn_only | {"self_bias": ((0, 4.0), (250, 0.0))},
    "Help1000": _ffn_only | {"self_bias": ((0, 4.0), (1000, 0.0))},
    "Late250": _ffn_only | {"self_bias": ((499, 0.0), (500, 4.0), (750, 0.0))},
    "LateBias4": _ffn_only | {"self_bias": ((999, 0.0), (1000, 4.0))},
    "NoResidual+Help1000": {"attn_residual": False, "ffn_residual": False, "self_bias": ((0, 4.0), (1000, 0.0))},
}
seeds = range(100, 108)
contrasts = [  # with what is predicted of each, in nats
    ("Help50", "unigram"),
    ("Help250", "unigram", (None, -0.5)),
    ("Help1000", "unigram", (None, -0.5)),
    ("Late250", "unigram"),
    ("LateBias4", "unigram"),
    ("NoResidual+Help1000", "unigram", (None, -0.5)),
    ("Help1000", "Bias4"),
    ("Help1000", "FullResidual", (0, None)),
    ("Value", "FFNOnly", (None, -0.5)),
    ("Late250", "Help250"),
]
margin = 0.02  # nats; ours
