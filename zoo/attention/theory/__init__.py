"""What is provable of softmax attention around a clean point, whatever made its queries, keys and values.

softmax_row.py   one row p = softmax(s) whose scores s change
core.py          softmax(scores) V: how far it moves, and how far it leaves its linearisation, given how far the
                 scores may move
separate.py      how far they may move where q, k and v are changed independently of each other
joint.py         where all three are linear in the same tokens: dot-product attention
forms.py         the remainder in quadratic forms of the changes of q, k and v, while each entry of the scores stays
                 within a reach of its own (reach.py); everywhere.py: those that hold however far scores move;
                 squares.py: the sums of squares that forms are made of
errors.py        what it costs that q, k, v and probabilities were computed (../computed.py: how far they are off)
"""
