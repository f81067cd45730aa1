# The workers find each other through variables that srun sets. If one fails, srun ends all of them.
for restart in $(seq 0 <restarts>); do
  export PHALANX_RESTART=$((${SLURM_RESTART_COUNT:-0} + restart))
  srun --label --kill-on-bad-exit=1 --distribution=block --cpus-per-task=<cores> <command> &
  wait_for_step $!
  if [ "$code" -eq 0 ]; then break; fi
  # 42: the workers were asked to exit, and saved first.
  if [ "$code" -eq 42 ]; then requeue; break; fi
done
