# Study A at 124M parameters, matched seeds.
#
# Answers to (arXiv 2608.14689, nats per token, mean ± sd over 5 seeds): FullResidual 4.577 ± 0.012, AttnOnly
# 6.037 ± 0.355, FFNOnly 7.569 ± 0.001; the ranges of AttnOnly and FFNOnly do not overlap, and AttnOnly is far more
# sensitive to the seed than at 10M (sd_ratio and p_pitman_morgan of AttnOnly − FullResidual in the report).
# The published abstract gives no corpus, length or rate. Our choice: GPT-2 small on OpenWebText with the GPT-2
# tokenizer, trained briefly, at the rate of nanoGPT.
#
# Memory of one device in bytes, by formula: 16 N for weights, gradients and AdamW, and for each of micro_batch_size x
# block_size tokens 37 L C kept by the layers in bfloat16 (65 L C in float32; removal adds 10) and 12 V for the logits;
# N parameters, L layers, width C, vocabulary V. The 37, 65 and 10 are measured on the tensors kept for the backward
# pass. So 2.0 GB + 0.97 GB a sequence in bfloat16: 18 GB at micro_batch_size=16, 10 GB at 8, 6 GB at 4; not measured on
# a GPU. Measured in float32 on a CPU, whole process: 3.4 GiB at 1 and 4.6 GiB at 2, formula 3.0 and 4.2 and 0.3 for the
# program.
#
# Time on G GPUs in seconds: runs x (tokens of a run / r + validation tokens of a run / v) / G, where r and v are the
# training and validation tokens per second of one GPU, as `make gpu` measures them for this shape. Here 20 runs x
# (131.1M / r + 11.5M / v) / G: with G = 1, or one run a GPU with G = 8. With DDP over eight GPUs G = 1, and r and v are
# those of all eight.

dataset = "openwebtext"
n_layer, n_head, n_embd = 12, 12, 768
block_size = 1024
vocab_size = 50304  # 50,257 rounded up to a multiple of 64
bias = False
dropout = 0.0
batch_size = 128  # 131,072 tokens a step
micro_batch_size = 16
max_iters = 1000
learning_rate, min_lr = 6e-4, 6e-5
warmup_iters = 100
beta1, beta2 = 0.9, 0.95
eval_interval = 100
eval_tokens = 1048576
checkpoint_interval = 200

arms = {
    "FullResidual": {},
    "AttnOnly": {"ffn_residual": False},
    "FFNOnly": {"attn_residual": False},
    "NoResidual": {"attn_residual": False, "ffn_residual": False},
}
seeds = range(5)
contrasts = [  # with what is predicted of each, in nats
    ("FFNOnly", "AttnOnly", (0, None)),
    ("AttnOnly", "FullResidual", (0, None)),
    ("NoResidual", "FFNOnly", (-0.02, 0.02)),
    ("FFNOnly", "unigram", (-0.02, 0.02)),
]
margin = 0.02  # nats; ours
