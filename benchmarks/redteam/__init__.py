"""The red team: a permanent search for a false certificate, or a false inequality that a certificate relies on.

    python -m benchmarks.redteam [--minutes M] [--seed S] [--only weights pairs lemmas scales]

Every attack is a file with `findings(seed)`, an endless stream. A finding's ratio is the value found over the value
claimed, outward slack included: above 1 the claim is false.

    weights   ascends on the weights of small models, and on the image, for drop / claimed loss
    pairs     pairs of linear maps that cancel, 2^20 to 2^100, after norms, attention, stems and pools
    lemmas    ascends on the promise of every module: radius, remainder, beta, gain, quadratic forms, rounding
    scales    a layer times S and the next by 1 / S; parameters of every shape that torch accepts
"""
