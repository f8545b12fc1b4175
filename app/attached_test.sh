#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The program on the processes of mpirun.
# usage: attached_test.sh PROGRAM SOURCE FOLDER SCENARIO MPIRUN...   (FOLDER is emptied first)
set -euo pipefail
program=$1 source=$2 folder=$3 scenario=$4
shift 4
launch=("$@")
rm -rf -- "$folder"
mkdir -p -- "$folder"
cd -- "$folder"
# Nothing of the caller's may reach the runs; and all processes of this test can be told.
unset "${!OMPI_COMM_@}" "${!PMIX@}" "${!SLURM_@}" RANK WORLD_SIZE LOCAL_RANK
export ISOSHARD_ATTACHED_TEST=$folder.$$
export COLUMNS=100000  # what is said is compared, not how it is broken into lines
autotp=(verify --preset small --attach --subjects autotp --tp 2 --dp 2 --dtype fp32)

fail() {
  printf '%s\n' "$1" >&2
  cat output >&2
  exit 1
}
# expect CODE RANKS ARGUMENTS...: runs the program on so many processes; what it says is in output.
expect() {
  local code=$1 ranks=$2 got=0
  shift 2
  "${launch[@]}" -n "$ranks" "$program" "$@" >output 2>&1 || got=$?
  [[ $got == "$code" ]] || fail "exit code must be $code, got $got: $*"
}
says() { grep -qE -- "$1" output || fail "must say: $1"; }
says_once() { [[ $(grep -cE -- "$1" output) == 1 ]] || fail "must be said once: $1"; }

# The processes of this test that run the program.
processes() {
  local of mark="ISOSHARD_ATTACHED_TEST=$ISOSHARD_ATTACHED_TEST"
  for of in /proc/[0-9]*; do
    [[ $(readlink "$of/exe" 2>/dev/null) == "$program" ]] || continue
    grep -qzxF "$mark" "$of/environ" 2>/dev/null || continue
    printf '%s\n' "${of#/proc/}"
  done
}
# No process that `strike` saw has left the name of its host's memory.
no_segments() {
  local pid
  for pid in $seen; do
    ! compgen -G "/dev/shm/isoshard-*.tmp.$pid.*" || fail "process $pid left a segment"
  done
}
# strike SIGNAL RANK ARGUMENTS...: trains on 4 processes until one of them gets a signal, and sets
# `code`. No process may be left.
strike() {
  local signal=$1 rank=$2 struck= pid run
  shift 2
  "${launch[@]}" -n 4 "$program" train --attach --subjects autotp --tp 2 --dp 2 --steps 4000 \
    --reference none --save-checkpoint saved --save-after 1 "$@" >output 2>&1 &
  run=$!
  until [[ -e saved/autotp/manifest.json ]]; do
    kill -0 "$run" 2>/dev/null || fail "the run ended before it could be struck"
    sleep 0.05
  done
  seen=$(processes)
  for pid in $seen; do
    if grep -qzx "OMPI_COMM_WORLD_RANK=$rank" "/proc/$pid/environ"; then struck=$pid; fi
  done
  [[ -n $struck ]] || fail "the run has no rank $rank"
  kill "-$signal" "$struck"
  code=0
  wait "$run" || code=$?
  [[ -z $(processes) ]] || fail "processes are left: $(processes)"
}

# Of a JSON file: what is measured of collectives but for times; names with their depth; losses.
counts() { grep -oE '"(purpose|calls_per_step_and_rank|bytes_per_step_all_ranks)": ?[^,}]*' "$1"; }
fields() { grep -oE '^ *"[a-z_0-9]+":' "$1" | sort -u; }
losses() { grep -oE '"(loss|grad_norm)": ?[^,}]*' "$1"; }

case $scenario in
  verdict)
    # The same cases, findings and numbers as on forked ranks.
    expect 0 4 "${autotp[@]}" --expect-world-size 4 --output-dir attached
    says_once '^CONFORMS \(exact'
    says '1 of 1 case conforms'
    "$program" "${autotp[@]/--attach/--tables=off}" --output-dir forked >forked.txt
    cmp <(grep -v '"environment"' attached/report.txt) forked/report.txt \
      || fail "the report must be that of forked ranks"
    # Collectives are the same; how long they take is measured on both.
    cmp <(counts attached/report.json) <(counts forked/report.json) || fail "calls must be equal"
    grep -q '"median_call_ms"' attached/report.json || fail "the report must have times"
    ;;
  bench)
    # The fields, losses and calls of forked ranks.
    export XDG_CACHE_HOME=$folder/cache
    bench=(bench --impl autotp --model tiny --tp_size 2 --seq_length 16 --dtype float32
      --num_training_steps 6 --warmup_steps 1)
    expect 0 2 "${bench[@]}" --attach --expect-world-size 2 --output-dir attached
    says_once '^gate: .* conforms \(exact\)'
    says 'what is hidden is not measured'
    "$program" "${bench[@]}" --output-dir forked >forked.txt
    own=attached/results_autotp_tp2_dp1.json of_forked=forked/results_autotp_tp2_dp1.json
    grep -q '"world_size": 2' "$own" || fail "the world must have 2 ranks"
    [[ $(grep -c '"memory_after_setup_gb"' "$own") == 2 ]] || fail "both ranks must have rows"
    for what in fields losses counts; do
      [[ -n $($what "$own") ]] || fail "$what must be there"
      cmp <($what "$own") <($what "$of_forked") || fail "$what must be those of forked ranks"
    done
    expect 0 2 "${bench[@]}" --attach --output-dir attached
    says_once 'conformed \(exact\) with this program and CPU'
    # auto: the processes of the job
    expect 0 2 "${bench[@]/--tp_size/--expect-world-size}" --attach --output-dir auto
    [[ -e auto/results_autotp_tp2_dp1.json ]] || fail "tp must be what the job has"
    expect 2 2 "${bench[@]}" --dp_size 2 --attach
    says_once 'has 4 ranks, the job has 2'
    expect 2 2 bench compare impl=ddp impl=autotp --model tiny --attach
    says_once 'bench compare has no --attach'
    expect 2 2 "${bench[@]}"
    says 'mpirun or srun started 2 processes .* add --attach'
    ;;
  train)
    expect 0 4 train --attach --subjects autotp --tp 2 --dp 2 --steps 3 --output-dir attached
    "$program" train --subjects autotp --tp 2 --dp 2 --steps 3 --output-dir forked >forked.txt
    cmp attached/loss_autotp.json forked/loss_autotp.json \
      || fail "the curve must be that of forked ranks"
    ;;
  converge)
    # Sets that fit, with the numbers of forked ranks. Rules are those of all sets.
    tests=(converge --test tp=2 --test tp=4,pp=2 --steps 6 --perturbed-runs 2 --dp 2)
    expect 0 4 "${tests[@]}" --attach --output-dir attached
    says 'skipped --test tp=4,pp=2: it needs [0-9]+ ranks, and the attached world has 4'
    "$program" converge --test tp=2 --steps 6 --perturbed-runs 2 --dp 2 --output-dir forked \
      >forked.txt
    cmp attached/loss_control.json forked/loss_control.json || fail "curves must be equal"
    cmp <(sed -n '/^Whole curves/,$p' attached/converge.txt) \
      <(sed -n '/^Whole curves/,$p' forked/converge.txt) || fail "numbers must be equal"
    expect 2 4 converge --test tp=4,pp=2 --dp 2 --attach
    says_once 'every test set needs more than the 4 ranks of the attached world'
    ;;
  golden)
    # Stored numbers of forked ranks, bit by bit.
    expect 0 4 golden verify 'lattice_*' step_qwen2_tp2_dp3 --attach
    says 'skipped step_qwen2_tp2_dp3: it needs 6 ranks'
    says 'MATCH +lattice_autotp_tp2'
    ;;
  fault)
    expect 1 6 verify --attach --fault mlp_input_grad_partial
    says 'rank-local partial over tp'
    says 'mpirun -n 6 .*verify .*--attach'
    ;;
  subset)
    expect 0 3 verify --preset small --attach --subjects ddp,autotp --dtype fp32
    says 'skipped qwen2_tp2_dp2: it needs 4 ranks, and the attached world has 3'
    says '2 of 2 cases conform'
    ;;
  refused)
    expect 2 2 "${autotp[@]}"
    says_once 'more than the 2 ranks of the attached world; start it with mpirun -n 4'
    expect 2 2 "${autotp[@]}" --expect-world-size 4
    says_once 'must have 4 ranks \(--expect-world-size\), got 2'
    expect 2 2 verify --preset small --subjects ddp --dp 2
    says 'mpirun or srun started 2 processes .* add --attach'
    expect 2 1 "${autotp[@]}" : -n 1 "$program" "${autotp[@]}" --steps 2
    says 'all processes must have the same arguments'
    got=0
    RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 "$program" "${autotp[@]}" >output 2>&1 || got=$?
    [[ $got == 2 ]] || fail "torchrun's variables must end with 2, got $got"
    says 'WORLD_SIZE=4 of torchrun, with which MPI would make 4 worlds of one rank'
    RANK=7 expect 2 4 "${autotp[@]}"
    says "RANK must be MPI's rank, got RANK=7"
    ;;
  alone)
    # A process that fails alone tells its error, and the others do not wait for it.
    mkdir -p here/model elsewhere
    cp -- "$source/fixtures/oracle/qwen2_untied_mha/config.json" here/model/
    alone=(verify --attach --model ./model --subjects ddp --dp 2 --dtype fp32)
    got=0
    "${launch[@]}" -n 1 --wdir "$folder/here" "$program" "${alone[@]}" : \
      -n 1 --wdir "$folder/elsewhere" "$program" "${alone[@]}" >output 2>&1 || got=$?
    [[ $got == 3 ]] || fail "exit code must be rank 1's own 3, got $got"
    says_once 'rank 1 on .*: isoshard: \./model: there is no such file'
    # What process 0 alone finds is told by nobody else.
    expect 2 4 "${autotp[@]}" --output-dir /proc/nowhere
    says_once '/proc/nowhere'
    ! grep -q 'collectives differ' output || fail "the others must not tell what they met"
    ;;
  storage)
    # Checkpoints go to a folder that all ranks share, that they can write to, and that no other run
    # writes to: all of it is told before the first step. Two folders stand for two hosts' disks.
    mkdir -p here elsewhere
    save=(train --attach --model tiny --subjects ddp --dp 2 --steps 2 --reference none
      --storage-path disk --save-checkpoint run)
    got=0
    "${launch[@]}" -n 1 --wdir "$folder/here" "$program" "${save[@]}" : \
      -n 1 --wdir "$folder/elsewhere" "$program" "${save[@]}" >output 2>&1 || got=$?
    [[ $got == 2 ]] || fail "exit code must be 2, got $got"
    says_once 'must be a folder that all hosts share, and rank 1 on .*elsewhere/disk/run/ddp what'
    ! grep -q CONFORMS output || fail "nothing may be trained"
    [[ ! -e here/disk/run/ddp && ! -e elsewhere/disk ]] || fail "nothing may be left"

    mkdir -p disk/run/ddp
    exec 9>disk/run/ddp/.isoshard.lock
    flock 9
    echo 4711 >&9
    expect 2 2 "${save[@]}"
    says_once '^isoshard: --save-checkpoint disk/run/ddp: is in use by another run, process 4711'
    exec 9>&-
    rm -r disk

    expect 0 2 "${save[@]}"
    [[ $(ls -A disk/run/ddp | grep -cv '^step.*safetensors$') == 1 ]] || fail "nothing but files"
    "$program" train --model tiny --subjects ddp --dp 2 --steps 3 --reference none \
      --resume disk/run/ddp >output 2>&1 || fail "the checkpoint must be whole"
    ;;
  worse)
    # Rank 1 alone asks for more: the printed report, the written one and the job end alike.
    run=(verify --preset small --attach --subjects ddp --dp 2 --dtype fp32 --reference plain
      --output-dir out)
    expect 1 1 "${run[@]}" : -n 1 -x ISOSHARD_REQUIRE=exact "$program" "${run[@]}"
    says_once 'rank 1 on .* judges worse than rank 0: its exit code is 1, that of rank 0 0: '
    says '^1 of 1 case conforms \(within tolerance\), but rank 1 on .* ends with exit code 1'
    grep -q '"exit_code": 1' out/report.json || fail "the report must have the code of the job"
    grep -q 'judges worse' out/junit.xml || fail "junit.xml must have what is wrong"
    ;;
  containers)
    # Rank 2 has a /dev/shm of its own, as in a container of the same name: another host.
    alone=(unshare --mount --propagation private)
    [[ $(id -u) == 0 ]] && "${alone[@]}" mount -t tmpfs tmpfs /dev/shm 2>/dev/null ||
      { echo "skipped: mount namespaces need root"; exit 77; }
    got=0
    "${launch[@]}" --mca btl tcp,self -n 2 "$program" doctor --attach : \
      -n 1 "${alone[@]}" bash -c 'mount -t tmpfs tmpfs /dev/shm; exec "$0" "$@"' "$program" \
      doctor --attach >output 2>&1 || got=$?
    [[ $got == 0 || $got == 4 ]] || fail "exit code must be 0, or 4 with a difference, got $got"
    says_once "^$(hostname) \(1\) +0, 1 "
    says_once "^$(hostname) \(2\) +2 "
    says "^$(hostname) \(1\) - $(hostname) \(2\) +0, 2 "
    ;;
  full_shm)
    # A /dev/shm of so many KiB. Without room for the table of the segment processes do without it.
    [[ $(id -u) == 0 ]] && unshare --mount --propagation private true 2>/dev/null ||
      { echo "skipped: mount namespaces need root"; exit 77; }
    launch=(unshare --mount --propagation private bash -c
      'mount -t tmpfs -o "size=$0k" tmpfs /dev/shm && exec "$@"' 4 "${launch[@]}"
      --mca btl tcp,self)
    expect 0 2 verify --preset small --attach --subjects ddp --dp 2 --dtype fp32
    launch[7]=1024
    expect 4 2 verify --preset small --attach --subjects ddp --dp 2 --dtype fp32
    says 'obtaining memory .* failed: No space left on device; /dev/shm must have room'
    ;;
  other_cpu)
    # Rank 1 computes with other kernels, as another type of CPU does.
    # So replicas drift apart, in training as here: that is found, and the reason is told.
    expect 1 1 verify --preset small --attach --subjects ddp --dp 2 --dtype fp32 \
      --output-dir other : -n 1 -x ATEN_CPU_CAPABILITY=default "$program" verify --preset small \
      --attach --subjects ddp --dp 2 --dtype fp32 --output-dir other
    says_once 'CPUs differ: rank 1 on .* rounds otherwise than rank 0'
    grep -q 'CPUs differ: rank 1' other/report.txt || fail "the report must say that CPUs differ"
    says 'What broke +parameter after step .* copies differ over dp'
    says 'Where .*; first on rank 1'
    ;;
  many)
    # More ranks than share memory, most of which have no part in a case of 32.
    expect 0 64 verify --preset small --attach --subjects ddp --dp 64 --dtype fp32
    says '^CONFORMS \(exact.* ddp qwen2_dp64'
    expect 0 33 verify --preset small --attach --subjects autotp --tp 2 --dp 16 --dtype fp32
    says '^CONFORMS \(exact.* autotp qwen2_tp2_dp16'
    got=0
    "$program" verify --preset small --subjects ddp --dp 32 --dtype fp32 >output 2>&1 || got=$?
    [[ $got == 2 ]] || fail "more forked ranks than 16 must end with 2, got $got"
    says 'needs 32 ranks; forked ranks are from 1 to 16: start more with mpirun -n 32 and --attach'
    ;;
  killed)
    strike KILL 2
    [[ $code == 137 ]] || fail "exit code must be mpirun's 137, got $code"
    no_segments
    says 'rank 2 .*signal 9 \(Killed\)'
    says 'rank [013] of 4 on .* was told to end by SIGTERM (in|after) .*, phase step [0-9]+'
    ;;
  crashed)
    strike SEGV 1
    [[ $code == 4 ]] || fail "exit code must be 4, got $code"
    says_once 'rank 1 of 4 on .* was ended by SIGSEGV (in|after) .*, phase step [0-9]+'
    ;;
  stopped)
    strike STOP 3 --deadline 2
    [[ $code == 4 ]] || fail "exit code must be 4, got $code"
    # whoever waits for it in a collective, or with data that it has not taken, ends the job
    says '(not all ranks of world|failed world cannot be left safely).* deadline passed: .*rank 3 '
    ;;
  stopped_between)
    # Stopped while process 0 computes the reference: no world runs, and all others wait for it.
    "${launch[@]}" -n 4 "$program" train --attach --subjects autotp --tp 2 --dp 2 --steps 20000 \
      --deadline 1 >output 2>&1 &
    run=$! first= last=
    until [[ -n $first && -n $last && -n $(pgrep -P "$first") ]]; do
      kill -0 "$run" 2>/dev/null || fail "the run ended before it could be struck"
      for pid in $(processes); do
        grep -qzx OMPI_COMM_WORLD_RANK=0 "/proc/$pid/environ" && first=${first:-$pid}
        grep -qzx OMPI_COMM_WORLD_RANK=3 "/proc/$pid/environ" && last=$pid
      done
    done
    kill -STOP "$last"
    code=0
    wait "$run" || code=$?
    [[ $code == 4 ]] || fail "exit code must be 4, got $code"
    [[ -z $(processes) ]] || fail "processes are left: $(processes)"
    says 'has waited for 1 s for work that others do between worlds'
    says 'a process did not come back from its own work within 30 s .*rank 3 has not entered'
    ;;
  two_at_once)
    "${launch[@]}" -n 4 "$program" "${autotp[@]}" >first 2>&1 &
    expect 0 4 "${autotp[@]}"
    wait $! || fail "the first of two runs failed"
    says '1 of 1 case conforms'
    ;;
  *) fail "unknown scenario $scenario" ;;
esac
