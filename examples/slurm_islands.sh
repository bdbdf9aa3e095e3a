#!/bin/bash
# Islands of a Slurm job: a coordinator, and one island on each node.
#
#     sbatch --nodes 4 examples/slurm_islands.sh diloco --period 500 --steps 20000 --data hf:NAME
#
# Arguments are METHOD and the options of a run; RUN=DIR and PORT=NUMBER may be set before sbatch. The directory must be
# one that all nodes see. Send the same again after a time limit or a crash: the run goes on from its checkpoints, and an
# island keeps its number, whichever node it comes to. When a node is lost the others go on.
#SBATCH --job-name=atoll
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --no-kill

set -euo pipefail

export RUN=${RUN:-runs/${SLURM_JOB_NAME:-atoll}} PORT=${PORT:-7447} ISLANDS=$SLURM_JOB_NUM_NODES
mkdir -p "$RUN"
touch "$RUN/started"

atoll coordinator "$RUN/coordinator" --islands "$ISLANDS" --address "$(hostname -f)" --port "$PORT" \
    >/dev/null 2>>"$RUN/coordinator.txt" &
coordinator=$!
trap 'kill "$coordinator" 2>/dev/null || true' EXIT
until [ "$RUN/coordinator/status.json" -nt "$RUN/started" ]; do
    kill -0 "$coordinator" || { tail -n 1 "$RUN/coordinator.txt" >&2; exit 1; }
    sleep 1
done

# New ones each time: an island that has joined before does not use its own up, but reads where the coordinator is now.
(umask 077 && atoll invite "$RUN/coordinator" --count "$ISLANDS" >"$RUN/invitations.txt")

srun --ntasks "$ISLANDS" --ntasks-per-node 1 --kill-on-bad-exit=0 --no-kill bash -c '
    invitation=$(sed -n "$((SLURM_PROCID + 1))p" "$RUN/invitations.txt")
    exec atoll join "$invitation" "$@" --workers "$ISLANDS" --resume \
        --listen "$(hostname -f):$((PORT + 2))" --out "$RUN/island-$SLURM_PROCID"
' island "$@"
