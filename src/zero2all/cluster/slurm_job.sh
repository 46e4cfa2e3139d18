#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1        # one agent, which starts the ranks of its node and binds each near its GPU;
                                   # --ntasks-per-socket is for one task per rank, and has no use here
#SBATCH --exclusive                # else a task has one core, and its ranks share it
#SBATCH --mem=0                    # all memory of a node, for the same reason
{gpus}
##SBATCH --time=24:00:00           # take one # away to set a limit: the job saves, is requeued and resumes
#SBATCH --signal=B:USR1@{signal}         # seconds before the limit, for the run to save
#SBATCH --requeue                  # Slurm starts the job again if a node fails
#SBATCH --open-mode=append         # and keeps the log of the first start
#SBATCH --output={name}-%j.log
{no_kill}

set -uo pipefail
max_requeues=100
{head}
# Every node runs this. An agent that was killed is started again, and the others admit it; any other status is final.
agent=$(cat <<'Z2A_AGENT'
trap : TERM  # Slurm signals this shell too, and must not take it for the end of the agent
kills=0
until {agent}; do
  status=$?
  ((status >= 128 && ++kills <= 10)) || exit $status
done
Z2A_AGENT
)
at_limit=
signalled=yes
# By scancel: srun would kill the agents as soon as it gets a signal itself.
trap 'signalled=yes; at_limit=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap 'signalled=yes' TERM  # scancel by the user: Slurm signals the agents too
# --cpu-bind=none: the task uses all cores of the job. A node that has saved must not end those that still save.
srun --export=ALL --cpu-bind=none --kill-on-bad-exit=0{srun} bash -c "$agent" &
while [[ $signalled ]]; do  # a signal ends wait, but not srun
  signalled=
  wait $!
  status=$?
done
if [[ $at_limit && $status != 0 && ${{SLURM_RESTART_COUNT:-0}} -lt $max_requeues ]]; then
  echo "the time limit is near and the run has saved: requeued, and will resume"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
