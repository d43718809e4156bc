"""The controller, without sockets and without a clock: it alone writes the map, and writes it to the disk before anyone sees it.

    member --JOIN, CAUGHT_UP, ...--> controller_process.on_frame -> events.on_frame -> HANDLERS or MEMBER_HANDLERS[kind]
    time ----------------------------------------------------------> events.on_tick
        members        join, leave, die: chains without a dead server, at once
        lost_shards    first placement, the last copy returns, rollback to a checkpoint
        rebalance      what can wait: target chains (shard_placement), learners, handovers, drains
        declarations, checkpoints       what servers do for a worker or an administrator
      -> ControllerState.publish_map    version + 1
    actions: Persist(document), then Send(MAP_UPDATE) to servers, Send(MAP) to watchers

`ControllerState` (state.py) holds everything. What is durable is in one document; the rest is learned again after a restart. While the
controller is down, nothing changes and nothing stops.

What it must never do: put a server into a chain that may lack something acknowledged. A chain only loses members (the others have
everything), or gains a learner that caught up: the head reports that after everything it had sent was acknowledged. A change that no
death forces waits until every server has the present map, so that none misses a map that concerns it.
"""
