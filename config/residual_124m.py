# Study A at 124M parameters, matched seeds.
#
# Answers to (arXiv 2608.14689, nats per token, mean ± sd over 5 seeds): FullResidual 4.577 ± 0.012, AttnOnly
# 6.037 ± 0.355, FFNOnly 7.569 ± 0.001; the ranges of AttnOnly and FFNOnly do not overlap, and AttnOnly is far more
# sensitive to the seed than at 10M (sd_ratio and p_pitman_morgan of AttnOnly − FullResidual in the report).
# The published abstract gives no corpus, length or rate. Our choice: GPT-2 small on OpenWebText with the GPT-2
# tokenizer, trained briefly, at the rate of nanoGPT.

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
contrasts = [
    ("FFNOnly", "AttnOnly"),
    ("AttnOnly", "FullResidual"),
    ("NoResidual", "FFNOnly"),  # predicted: equivalent
    ("FFNOnly", "unigram"),  # predicted: equivalent
]
margin = 0.02  # nats; ours
