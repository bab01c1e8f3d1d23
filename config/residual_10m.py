# Study A at 10M parameters, the deterministic sweep.
#
# Answers to (arXiv 2608.14689, nats per token, mean ± sd over 8 seeds): AttnOnly 1.580 ± 0.003, FFNOnly 3.350 ± 0.002,
# NoResidual in the regime that FFNOnly reaches. The published abstract gives no shape. Our choice: nanoGPT's character
# level Shakespeare model (6 layers, 6 heads, width 384, context 256), whose unigram reference is 3.3473 nats, and its
# training settings.
#
# Memory of one device in bytes, by formula: 16 N for weights, gradients and AdamW, and for each of micro_batch_size x
# block_size tokens 37 L C kept by the layers in bfloat16 (65 L C in float32; removal adds 10) and 12 V for the logits;
# N parameters, L layers, width C, vocabulary V. The 37, 65 and 10 are measured on the tensors kept for the backward
# pass. So 0.2 GB + 0.02 GB a sequence in bfloat16, and about as much again for dropout: 3 GB at batch_size=64; not
# measured on a GPU. A CPU keeps the attention matrices for dropout, measured in float32, whole process: 1.2 GiB at 8
# sequences, 2.4 GiB at 16.
#
# Time on G GPUs in seconds: runs x (tokens of a run / r + validation tokens of a run / v) / G, where r and v are the
# training and validation tokens per second of one GPU, as `make gpu` measures them for this shape. Here 32 runs x
# (81.9M / r + 2.3M / v) / G: with G = 1, or one run a GPU with G = 8.

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
contrasts = [  # with what is predicted of each, in nats
    ("FFNOnly", "AttnOnly", (0, None)),
    ("AttnOnly", "FullResidual", (0, None)),
    ("NoResidual", "FFNOnly", (-0.02, 0.02)),
    ("FFNOnly", "unigram", (-0.02, 0.02)),
]
margin = 0.02  # nats; ours
