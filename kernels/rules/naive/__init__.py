"""The rules at the draft positions of one request, in plain Python: the definition.

`rules.fused` follows them function by function in Triton; on a CPU they run as they are. At one
draft position let z be the target's processed logits, x the draft token, z1 >= z2 the two largest
logits, p the softmax of z, r = z1 - z[x] in nats, S the tokens that are kept: the protected ones,
those that end the request, and by a rule that accepts nothing outright, where it samples, those
that followed the last token before the position earlier in the answer (`CpuConstraints`).

Greedily a position is strict where x or the first choice is kept, and where x completes a longer
n-gram of the answer than the first choice would (REPEAT). A token is not relaxed where its r does
not fit into what the request may still lose (LOSS). What it loses is r, and so is the drift.

Where a request samples, one distribution m is served at each position, which depends on its row and
on the tokens before it; `served_dist` says what follows from it.

No rule looks further than the answer can go: at its last token nothing can be gained, nor where a
draft that is given (of a greedy request, or not drawn) ends it. A drawn draft is not looked at:
what is served must not depend on what was drawn.
"""
