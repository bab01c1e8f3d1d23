# Is more help needed in a deeper model? Planned after seed 150 of residual_10m_cpu, before any run of its own.
#
# In that run Help250 stayed at the unigram reference, where the same help makes the model of basin_1m learn. A bias b
# is less there: at the first step a query shares its attention about evenly among the t positions before it, and gives
# its own e^b / (e^b + t). The mean over positions is e^b / T * ln(1 + T / e^b). That is 0.66 with b = 4 and T = 64, and
# 0.37 with T = 256. Through all layers it is 0.66^4 = 0.19 in basin_1m and 0.37^6 = 0.003 here. With b = 6 it is
# 0.77^6 = 0.21 here, so if this share decides, that bias does here what 4 does there. With b = 8 it is 0.96^6 = 0.78.
# Predicted of both is an end below unigram by more than 0.5. At unigram again, the help would have failed at this
# depth, and not for want of strength.
#
# All else is as in residual_10m_cpu.py; seeds that no experiment here has used.

exec(open("config/residual_10m_cpu.py").read())  # noqa: SIM115
arms = {
    "Help250b6": {"attn_residual": False, "self_bias": ((0, 6.0), (250, 0.0))},
    "Help250b8": {"attn_residual": False, "self_bias": ((0, 8.0), (250, 0.0))},
}
seeds = range(153, 156)
contrasts = [("Help250b6", "unigram", (None, -0.5)), ("Help250b8", "unigram", (None, -0.5))]
