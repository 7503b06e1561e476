"""Multi-head latent attention (MLA) of a few new positions over cached latents, for decoding.

MLA (DeepSeek-AI 2024, arXiv:2405.04434) computes the keys and values of all heads from one latent c per position, and
appends one rotated key r that the heads share:

    key of head n    = [U_n c, r]        value of head n = V_n c

The query of head n has an unrotated part q_n and a rotated part p_n. U_n is absorbed into the query and V_n into the
output, so that only c and r are cached:

    score = q_n (U_n c) + p_n r = (U_n^T q_n) c + p_n r        result = V_n (sum of weights times c)

All heads read the same latents, so each product is one matmul over all heads.

Shapes: B batch, S new positions, C cache slots, N query heads, Q = N S, L latent, R rotated channels.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention.decode_attention import VisibleSlots
from paddlenlp_ext.ops.attention.score_options import PLAIN, ScoreOptions, attention_weights


def latent_decode_attention(
    q_BSNL: paddle.Tensor,
    q_BSNR: paddle.Tensor,
    latents_B1CL: paddle.Tensor,
    keys_B1CR: paddle.Tensor,
    seen: VisibleSlots,
    scale: float,
    options: ScoreOptions = PLAIN,
) -> paddle.Tensor:
    """Return the attention-weighted mean of the latents for each head, [B, S, N, L].

    Args:
        q_BSNL: queries times the matrix that computes keys from latents.
        q_BSNR: rotated part of the queries.
        latents_B1CL: cached latents.
        keys_B1CR: cached rotated keys.
        seen: visible slots of each position, at least one.
        scale: factor of the scores.
        options: soft-cap, linear biases and sinks.
    """
    heads, latent = q_BSNL.shape[2:]
    num_slots = latents_B1CL.shape[2]
    # In `reshape`, 0 keeps the size of an axis and -1 is inferred: B, S and C are unknown in a static graph.
    q_B1QL, q_B1QR = (
        (q_BSNI * scale).transpose([0, 2, 1, 3]).reshape([0, 1, -1, q_BSNI.shape[-1]]) for q_BSNI in (q_BSNL, q_BSNR)
    )
    scores_B1QC = paddle.matmul(q_B1QL, latents_B1CL, transpose_y=True)
    scores_B1QC = scores_B1QC + paddle.matmul(q_B1QR, keys_B1CR, transpose_y=True)
    bias_BNSC = seen.bias(num_slots).unsqueeze(1)
    if options.slopes is not None:
        bias_BNSC = bias_BNSC + seen.linear_bias(num_slots, options.slopes)
    scores_BNSC = scores_B1QC.reshape([0, heads, -1, 0])
    weights_BNSC = attention_weights(scores_BNSC, bias_BNSC, options.softcap, options.sinks)
    weights_B1QC = weights_BNSC.astype(latents_B1CL.dtype).reshape([0, 1, -1, 0])
    mean_B1QL = paddle.matmul(weights_B1QC, latents_B1CL)
    return mean_B1QL.reshape([0, heads, -1, latent]).transpose([0, 2, 1, 3])
