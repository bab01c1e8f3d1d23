# Study B's training test as published: 3 arms, 8 paired seeds, 50.9M parameters, 399,900,672 tokens a run.
#
# Answers to (nats per token): fixed − baseline +0.0011, p = 0.197; self − baseline −0.0029, Holm p = 0.0023;
# self − fixed −0.0040, p = 0.0018. Exactly these arms and contrasts.
# Read off the published counts: 8 layers, 8 heads, width 512 and 50,304 tied embeddings are 50.9M (positions not
# counted); 3,051 steps of 131,072 tokens are 399,900,672. Our choice, since not published: corpus, rate, betas.
#
# Memory of one device in bytes, by formula: 16 N for weights, gradients and AdamW, and for each of micro_batch_size x
# block_size tokens 37 L C kept by the layers in bfloat16 (65 L C in float32; removal adds 10) and 12 V for the logits;
# N parameters, L layers, width C, vocabulary V. The 37, 65 and 10 are measured on the tensors kept for the backward
# pass. So 0.8 GB + 0.78 GB a sequence in bfloat16: 13 GB at micro_batch_size=16, 7 GB at 8, 4 GB at 4; not measured on
# a GPU. Measured in float32 on a CPU, whole process: 2.0 GiB at 1 and 3.2 GiB at 2, formula 1.6 and 2.4 and 0.3 for the
# program; the rest is the CPU's allocator, so leave room.
#
# Time on G GPUs in seconds: runs x (tokens of a run / r + validation tokens of a run / v) / G, where r and v are the
# training and validation tokens per second of one GPU, as `make gpu` measures them for this shape. Here 24 runs x
# (399.9M / r + 58.7M / v) / G: with G = 1, or one run a GPU with G = 8.

dataset = "fineweb-edu"
n_layer, n_head, n_embd = 8, 8, 512
block_size = 1024
vocab_size = 50304
bias = False
dropout = 0.0
batch_size = 128  # 131,072 tokens a step
micro_batch_size = 16
max_iters = 3051
learning_rate, min_lr = 6e-4, 6e-5
warmup_iters = 200
beta1, beta2 = 0.9, 0.95
eval_interval = 250
eval_tokens = 4194304
checkpoint_interval = 250

arms = {
    "baseline": {},
    "self": {"removal": "self"},
    "fixed": {"removal": "fixed"},
}
seeds = range(8)
contrasts = [
    ("fixed", "baseline"),
    ("self", "baseline"),
    ("self", "fixed"),
]
margin = 0.002  # nats; ours: below the effect that the study reports
