# The causal test that study A proposes and leaves open: is mixing across positions what makes the missing attention
# residual fatal?
#
# Without the attention residual, all that a position knows of its own token must come through attention. If mixing is
# what loses it, then
#   FFNOnly+NoRouting (every position attends to itself only: an own-token path, no mixing) leaves the unigram reference
#   and stops at the bigram one, the best that a model of one letter can do;
#   FFNOnly+SelfBias (attention mixes, but each query's logit for its own position is raised by 4: an own-token path
#   with mixing) trains past the bigram reference.
# NoRouting alone tests the path without the mixing, SelfBias the path with it; only together do they bear on the
# mechanism. What is predicted stands beside each contrast, and so in the plan: against bigram from −0.02 to +0.1, as a
# model of one letter can hardly beat bigram counts but a trained one may be a little worse; FFNOnly+NoRouting and
# FullResidual+NoRouting equal, as the residual would have no other use once the own token has a path.
#
# Shape and training as in residual_1m.py; the first four arms are its arms, so the 32 runs are the same to the bit.

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

_residuals = {
    "FullResidual": {},
    "AttnOnly": {"ffn_residual": False},
    "FFNOnly": {"attn_residual": False},
    "NoResidual": {"attn_residual": False, "ffn_residual": False},
}
_paths = {"": {}, "+NoRouting": {"routing": False}, "+SelfBias": {"self_bias": 4.0}}
arms = {name + path: flags | more for path, more in _paths.items() for name, flags in _residuals.items()}
seeds = range(8)
contrasts = [  # with what is predicted of each, in nats
    ("FFNOnly", "unigram", (-0.02, 0.02)),
    ("FFNOnly+NoRouting", "unigram", (None, -0.5)),
    ("FFNOnly+NoRouting", "bigram", (-0.02, 0.1)),
    ("NoResidual+NoRouting", "bigram", (-0.02, 0.1)),
    ("FFNOnly+NoRouting", "FullResidual+NoRouting", (-0.02, 0.02)),
    ("FFNOnly+SelfBias", "bigram", (None, 0)),
    ("FFNOnly+SelfBias", "FFNOnly+NoRouting", (None, 0)),
    ("FFNOnly+SelfBias", "FullResidual+SelfBias"),  # nothing predicted: how much is left for the residual
]
margin = 0.02  # nats; ours
