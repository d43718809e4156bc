"""One server's part in the protocol, without sockets and without a clock: frames and the time go in, actions come out.

The path of a push, from socket to table and back:

    worker --PUSH--> server_process.on_frame
                       events.on_frame -> HANDLERS[PUSH] = push.on_push
                         push.try_push               ready? superseded? the worker's next push?   (or it waits)
                           ShardState.apply_push     lsn, deduplication, clocks
                             ParameterStore.apply    rows
                           replication.forward       LOG_ENTRY with the frame's bytes, to each backup ----> backup.on_head_frame
                           replication.ack_when_replicated                                                    accepts(head, version)?
                                                                                                              ShardState.apply_push
                       events.on_link_frame -> catch_up.on_acked <--------REPLICA_ACK--------------------------------'
                         replication.send_ack
    worker <--ACK------ actions: Send(PEER, ...)

`ReplicaState` (state.py) holds everything; all else are functions on it, by concern. As *head* of a shard: push, read, replication (the log,
acknowledgements), clocks (entries of the head's own), catch_up (snapshots, handover). As *backup* or learner: backup. Both: map_change.

What makes it safe:

- A replica refuses entries from any server but the head in its own map, and entries that the head sent under a map older than its
  headship. A head that was replaced, and does not know it yet, never gets the answers that it needs to acknowledge anything.
- (entry_version, lsn) names a shard's state: the map version under which the last entry was ordered, and the number of entries. A new head
  compares it with each replica's before it takes pushes; a replica that differs gets a snapshot. lsn alone is not enough: after a failover
  two replicas may have equally many entries, but not the same.
- Frames sent under a newer map wait until that map is here. A push waits for the worker's earlier ones: each push covers every shard.
- Reads are answered while every backup (and required learner) has answered something sent within the last LEASE under a map that is not
  newer than this head's. A new head waits until LEASE after its own last answer to the old one.

Frames of workers (meta; arrays): PULL {version, worker, incarnation, step, bound, ops: [{table, wire} | {dense}]}; shards u16, then ids or
blocks per op -> ROWS {counts}; per op rows (and scales), or the blocks end to end. PUSH {version, worker, incarnation, seq, step, tick,
aggregate, lr, ops: [{table} | {table, assign} | {dense} | {set}]}; shards, then per op distinct ids and values (n, dim), or blocks and one
array per block -> ACK {seq}. Either may be answered with STALE_MAP {version}: nothing was done, ask again under a map at least that new; or
REFUSED {error, message}.
"""
