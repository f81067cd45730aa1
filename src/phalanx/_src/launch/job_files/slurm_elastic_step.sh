# Runs the launcher of one node. 76: machines are gone. If the first one is, only the launchers of the others can requeue the job.
launch() {
  trap : TERM
  "$@"
  code=$?
  if [ "$code" -eq 76 ]; then requeue; fi
  exit "$code"
}
export -f launch requeue

export PHALANX_RESTART=${SLURM_RESTART_COUNT:-0}
# Each node has one launcher, which starts its worker again. They meet on the first node, and continue without a node that is lost.
srun --label --no-kill --kill-on-bad-exit=0 --distribution=block --cpus-per-task=<cores> bash -c 'launch "$@"' launch <command> &
wait_for_step $!
