"""Several processes that share their streams. Start one more to serve more; end one to update it.

Each process is the whole service: HTTP, one worker, an encoder if there is one. What they share is the store.

- `partitions`: a stream belongs to one of 4,096 partitions. Rendezvous hashing of the processes' names says who should
  own a partition, so each process computes the same without a leader, and a process more or less moves few of them.
- `membership`: who owns a partition is a row in the database with an epoch. Each process renews one row, its lease, and
  by it all of its partitions. An owner hands a partition over as soon as another process should have it: it accepts
  nothing more for it, unloads its streams, and writes the new owner. The partitions of a process whose lease ran out
  are taken by those that should own them. The clock of the database decides, never that of a machine.
- `forwarding`: a request that arrives at the wrong process goes to the owner in one hop. Processes that fail get none.
- `peers`: the calls that do it. The name of a process is its address.
- `service`: the parts together.
- `cells`: a front before several databases, each with processes of its own. It needs none of the other modules.

Partitions say who should load a stream. They don't protect it. The fence that the store gives out with each acquisition
does: only its newest one can write, whatever a process believes. So acquiring a stream does not check who owns its
partition. The check would cost a second row lock per load, and could not replace the fence, because an owner that was
paused may write long after it checked. Without it, a process can serve for an owner that lives but cannot be reached.
"""
