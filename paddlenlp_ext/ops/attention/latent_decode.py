"""Attention of a few new positions over cached latents, run in every layer of every decoding step.

Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434) computes the keys and values of all heads from one
latent c per position and adds one rotated key r that the heads share:

    key of head n    = [U_n c, r]        value of head n = V_n c

The products with U_n and V_n move to the query and to the result ("absorbed"), so that only c and r are cached:

    score = q_n (U_n c) + p_n r = (U_n^T q_n) c + p_n r        result = V_n (sum of weights times c)

All heads read the same latents, so each product is one matmul over all heads.

Shapes: B batch, S new positions, C cache slots, N query heads, L latent, R rotated channels.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention.decode import VisiblePositions
from paddlenlp_ext.ops.attention.scores import PLAIN, ScoreOptions, attention_weights


def latent_decode_attention(
    q_BSNL: paddle.Tensor,
    q_BSNR: paddle.Tensor,
    latents_B1CL: paddle.Tensor,
    keys_B1CR: paddle.Tensor,
    seen: VisiblePositions,
    scale: float,
    options: ScoreOptions = PLAIN,
) -> paddle.Tensor:
    """Compute the mean latent that each head of a new position attends to, [B, S, N, L], without gradient.

    Args:
        q_BSNL: queries times the matrix that computes keys from latents.
        q_BSNR: rotated part of the queries.
        latents_B1CL: cached latents.
        keys_B1CR: cached rotated keys.
        seen: visible slots of each position, at least one.
        scale: factor of the scores.
        options: soft-cap, linear biases and sinks.
    """
    batch, length, heads, _ = q_BSNL.shape
    latents_BCL, keys_BCR = latents_B1CL.squeeze(1), keys_B1CR.squeeze(1)
    num_slots = latents_BCL.shape[1]
    scores_BQC = paddle.matmul((q_BSNL * scale).flatten(1, 2), latents_BCL, transpose_y=True)
    scores_BQC = scores_BQC + paddle.matmul((q_BSNR * scale).flatten(1, 2), keys_BCR, transpose_y=True)
    scores_BNSC = scores_BQC.reshape([batch, length, heads, num_slots]).transpose([0, 2, 1, 3])
    bias_BNSC = seen.bias(num_slots).unsqueeze(1)
    if options.slopes is not None:
        bias_BNSC = bias_BNSC + seen.linear_bias(num_slots, options.slopes)
    weights_BNSC = attention_weights(scores_BNSC, bias_BNSC, options.softcap, options.sinks)
    weights_BQC = weights_BNSC.astype(latents_BCL.dtype).transpose([0, 2, 1, 3]).reshape(scores_BQC.shape)
    return paddle.matmul(weights_BQC, latents_BCL).reshape([batch, length, heads, -1])
