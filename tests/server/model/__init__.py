"""A model checker for the protocol: all interleavings of a small case, over the real replica, controller and outbox.

Every message may be delivered at any time (in order per connection), and at any time the case's budget of misfortunes may be spent:
a server crashes, a live one is judged dead (stopped, or cut off from the controller), a connection is cut, the controller crashes, a
server joins, one is drained. States that were seen before are not explored again. What must hold:

- each replica holds exactly what its windows say it was given (so nothing is applied twice or half);
- every live member of a shard's chain, as the controller's disk has it, has everything that was ever acknowledged on that shard;
- once a head acknowledged, no head of an earlier epoch does (but what the new one has too);
- from every end, when the network behaves again, all pushes are acknowledged, and replicas are equal.

Time stands still but for the fair ending; leases of reads are checked by `tests/server/test_replica.py` on a clock.
"""

from tests.server.model.case import Broken, Case, Found
from tests.server.model.explore import explore

__all__ = ["Broken", "Case", "Found", "explore"]
