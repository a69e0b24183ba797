"""Code that all attention of the form softmax(score) V shares: the module, and the rules that its theory gives.

module.py           SoftmaxAttention and QKVAttention, which the variants derive from
qkv.py              how q, k and v follow from the tokens, and the rules that follow from that
rules.py            all rules of a variant in one call
parts.py            softmax(scores) V by forms, and its third order
projected_forms.py  projections with a function of each row behind them
quotient_forms.py   the same for the quotient of Lipschitz normalisation, with the core behind it
computed.py         how far the q, k, v and probabilities that rules compute are off
rounding.py         the rounding of the module in float32, from that of q, k and v: rows.py, quotient.py
"""
