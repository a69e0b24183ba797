"""Provable bounds of softmax attention around a clean point, for queries, keys and values from any source.

softmax_row.py     one row p = softmax(s) whose scores s change
core.py            softmax(scores) V: how far it moves, and how far it leaves its linearisation, given how far the
                   scores may move
separate.py        how far they may move where q, k and v change independently of each other
joint.py           where all three are linear in the same tokens: dot-product attention
forms.py           the remainder in quadratic forms of the changes of q, k and v, while each entry of the scores stays
                   within its own reach (score_range.py); everywhere.py: forms that hold however far scores move;
                   squares.py: the sums of squares that forms are made of
score_errors.py    the cost of computed q, k, v and probabilities (../softmax/computed.py: how far they are off)
score_rounding.py  the rounding of the products of the core
"""
