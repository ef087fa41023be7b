"""Reference for the rules at the draft positions of one request, in plain Python."""

#     greedy(rows, begin, end, budget) -> list[Verdict]
#     sampled(rows, begin, end, budget) -> list[RowDecision], for fixed drafts
#
# At a position, z are the target's processed logits, z1 >= z2 the two largest, p their softmax, x
# the draft token, r = z1 - z[x] in nats, and S the preserved tokens: protected tokens, stop ids,
# and, in sampled requests unless the rule accepts outright, tokens that have followed the last
# token earlier in the answer.
#
# Greedy: a position is strict if x or the argmax is in S, or if x completes a longer n-gram of the
# answer than the argmax would (REPEAT). A token is not relaxed if r exceeds the remaining budget
# (LOSS). Loss and drift of a relaxed token are r.
#
# Sampled: one distribution m is served at each position, a function of its row and of the tokens
# before it: see `served_dist`.
#
# Nothing can be gained at the last token of the answer, nor after a token that ends it in a greedy
# or fixed draft. Probabilistic drafts are not read, because m must not depend on sampled tokens.
