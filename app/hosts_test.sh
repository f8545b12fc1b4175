#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The program on several hosts: network namespaces h1, h2 and h3 with names and addresses of their
# own, joined by a switch. mpirun runs on h1 and reaches the others as it reaches machines by ssh.
# usage: hosts_test.sh PROGRAM FOLDER SLOW_LINK SCENARIO MPIRUN...   (FOLDER is emptied first)
# Leaves with 77, ctest's skip, where namespaces cannot be made.
set -euo pipefail
program=$1 folder=$2 slow_link=$3 scenario=$4
shift 4
[[ $(id -u) == 0 ]] || { echo "skipped: network namespaces need root"; exit 77; }
command -v ip >/dev/null || { echo "skipped: needs ip (iproute2)"; exit 77; }
rm -rf -- "$folder"
mkdir -p -- "$folder"
cd -- "$folder"
unset "${!OMPI_COMM_@}" "${!PMIX@}" "${!SLURM_@}" RANK WORLD_SIZE LOCAL_RANK
export ISOSHARD_HOSTS_TEST=$folder.$$
export COLUMNS=100000  # what is said is compared, not how it is broken into lines
autotp=(verify --preset small --attach --subjects autotp --tp 2 --dp 2 --dtype fp32)

# Namespaces of this test, and those that a killed one has left.
prefix=isoshard-test-$$
clean_up() {
  local name owner
  for name in $(ip netns list 2>/dev/null | sed -n 's/^\(isoshard-test-[0-9]*-[^ ]*\).*/\1/p'); do
    owner=${name#isoshard-test-}
    owner=${owner%%-*}
    if [[ $owner == "$$" || ! -e /proc/$owner ]]; then ip netns del "$name" 2>/dev/null || true; fi
  done
}
clean_up
trap clean_up EXIT
add_host() {
  ip netns add "$prefix-$1" || { echo "skipped: no network namespaces here"; exit 77; }
  ip -n "$prefix-$1" link set lo up
}
# host NAME NUMBER: a host at the switch, as 10.77.0.NUMBER.
host() {
  add_host "$1"
  ip -n "$prefix-switch" link add "$1" type veth peer name eth0 netns "$prefix-$1"
  ip -n "$prefix-switch" link set "$1" master br0 up
  ip -n "$prefix-$1" addr add "10.77.0.$2/24" dev eth0
  ip -n "$prefix-$1" link set eth0 up
}
three_hosts() {
  add_host switch
  ip -n "$prefix-switch" link add br0 type bridge || { echo "skipped: no bridges here"; exit 77; }
  ip -n "$prefix-switch" link set br0 up
  host h1 1
  host h2 2
  host h3 3
}
# Two hosts on a cable of so many milliseconds.
distant_hosts() {
  [[ -c /dev/net/tun ]] || { echo "skipped: needs /dev/net/tun"; exit 77; }
  add_host h1
  add_host h2
  : >cable
  "$slow_link" "$1" "$prefix-h1" eth0 "$prefix-h2" eth0 >>cable &
  until grep -q ready cable; do kill -0 $! || fail "the cable broke"; done
  ip -n "$prefix-h1" addr add 10.77.0.1/24 dev eth0
  ip -n "$prefix-h2" addr add 10.77.0.2/24 dev eth0
  ip -n "$prefix-h1" link set eth0 up
  ip -n "$prefix-h2" link set eth0 up
}
# What mpirun calls instead of ssh: AGENT HOST COMMAND...
cat >agent <<AGENT
#!/bin/sh
host=\$1; shift
exec ip netns exec $prefix-\$host unshare --uts sh -c "hostname \$host; \$*"
AGENT
chmod +x agent
for count in 1 2; do printf 'h1 slots=%d\nh2 slots=%d\n' $count $count >"hosts$count"; done
printf 'h1 slots=1\nh2 slots=1\nh3 slots=1\n' >hosts3
printf 'h1 slots=2\nh9 slots=2\n' >dead
# mpirun notices within 3 s that a daemon is gone; docs/reference/cluster.md says why this must be
# asked for.
launch=(ip netns exec "$prefix-h1" unshare --uts sh -c 'hostname h1; exec "$@"' sh "$@"
  --mca plm_rsh_agent "$folder/agent" --mca oob_tcp_keepalive_time 1
  --mca oob_tcp_keepalive_intvl 1 --mca oob_tcp_keepalive_probes 2)

fail() {
  printf '%s\n' "$1" >&2
  cat output >&2
  exit 1
}
# expect CODE ARGUMENTS OF MPIRUN...: what is said is in output.
expect() {
  local code=$1 got=0
  shift
  "${launch[@]}" "$@" >output 2>&1 || got=$?
  [[ $got =~ ^$code$ ]] || fail "exit code must be $code, got $got: $*"
}
says() { grep -qE -- "$1" output || fail "must say: $1"; }
says_not() { ! grep -E -- "$1" output || fail "must not say: $1"; }
conforms() {
  expect 0 "$@" "$program" "${autotp[@]}" --expect-world-size 4
  says '^CONFORMS \(exact'
}

# The processes of this test that run the program, on all hosts.
processes() {
  local of mark="ISOSHARD_HOSTS_TEST=$ISOSHARD_HOSTS_TEST"
  for of in /proc/[0-9]*; do
    [[ $(readlink "$of/exe" 2>/dev/null) == "$program" ]] || continue
    grep -qzxF "$mark" "$of/environ" 2>/dev/null || continue
    printf '%s\n' "${of#/proc/}"
  done
}
# Starts a training run on two ranks of h1 (0, 1) and two of h2 (2, 3), and returns when it has
# trained a step: all ranks are at work.
start_training() {
  "${launch[@]}" --hostfile hosts2 -n 4 "$program" train --attach --subjects autotp --tp 2 --dp 2 \
    --steps 4000 --reference none --save-checkpoint saved --save-after 1 "$@" >output 2>&1 &
  run=$!
  until [[ -e saved/autotp/manifest.json ]]; do
    kill -0 "$run" 2>/dev/null || fail "the run ended before it could be struck"
    sleep 0.05
  done
}
process_of_rank() {
  local pid
  for pid in $(processes); do
    if grep -qzx "OMPI_COMM_WORLD_RANK=$1" "/proc/$pid/environ"; then echo "$pid"; fi
  done
}
# ctest's deadline is that of a hang; no process may be left on any host.
ended() {
  code=0
  wait "$run" || code=$?
  while [[ -n $(processes) ]]; do sleep 0.05; done
}

case $scenario in
  conforms)
    three_hosts
    conforms --hostfile hosts2 -n 4                # dp across: ranks 0, 1 on h1 and 2, 3 on h2
    conforms --hostfile hosts2 --map-by node -n 4  # tp across: ranks 0, 2 on h1 and 1, 3 on h2
    says_not 'cannot be repeated'                  # both hosts computed the same reference
    expect 0 --hostfile hosts2 -n 4 "$program" train --attach --subjects autotp --tp 2 --dp 2 \
      --steps 3
    says '^CONFORMS \(within'
    says_not 'cannot be repeated'
    expect 255 --hostfile dead -n 4 "$program" "${autotp[@]}"
    says 'ORTE was unable to reliably start one or more daemons'
    ;;
  doctor)
    three_hosts
    # Links are measured, so a busy machine may say something of them.
    expect '[04]' --hostfile hosts2 --map-by node -n 4 "$program" doctor --attach
    says '^h1 +0, 2 '
    says '^h2 +1, 3 .* [-+][0-9.]+ \+- [0-9.]+ ms'
    says '^h1 - h2 +0, 1 '
    says '^within h2 +1, 3 '
    says_not 'problem: (h[12] |/dev/shm|the clock)'
    # Another program, and a CPU with other kernels.
    cp -- "$program" other
    printf x >>other
    expect 4 -n 1 --host h1 "$program" doctor --attach : -n 1 --host h2 \
      -x ATEN_CPU_CAPABILITY=default "$folder/other" doctor --attach
    says 'problem: h2 \(rank 1\) has another isoshard'
    says 'problem: h2 \(rank 1\) has a CPU that rounds otherwise'
    # A network card of 8 Mbit/s.
    if tc -n "$prefix-switch" qdisc add dev h3 root tbf rate 8mbit burst 32kb latency 50ms; then
      expect 4 --hostfile hosts3 -n 3 "$program" doctor --attach
      says 'problem: h[12] - h3 must be about as fast as the best link of its kind'
    fi
    ;;
  three)
    three_hosts
    expect 0 --hostfile hosts3 -n 3 "$program" verify --preset small --attach --subjects ddp \
      --dp 3 --dtype bf16
    says '1 of 1 case conforms'
    ;;
  distant)
    distant_hosts 20
    conforms --hostfile hosts2 --map-by node -n 4
    ;;
  link_down)
    three_hosts
    start_training
    ip -n "$prefix-switch" link set h2 down
    ended
    [[ $code != 0 ]] || fail "a run whose link broke must fail"
    says 'lost communication with a remote daemon'
    says 'Remote daemon: .* on node h2'
    says 'rank 0 of 4 on h1 was told to end by SIGTERM (in|after) .*, phase '
    ;;
  killed)
    three_hosts
    start_training
    kill -KILL "$(process_of_rank 2)"
    ended
    [[ $code == 137 ]] || fail "exit code must be mpirun's 137, got $code"
    says 'rank 2 .*on node h2 .*signal 9 \(Killed\)'
    says 'rank 0 of 4 on h1 was told to end by SIGTERM (in|after) .*, phase step [0-9]+'
    ;;
  stopped)
    three_hosts
    start_training --deadline 2
    kill -STOP "$(process_of_rank 3)"
    ended
    [[ $code == 4 ]] || fail "exit code must be 4, got $code"
    # whoever waits for it in a collective, or with data that it has not taken, ends the job
    says '(not all ranks of world|failed world cannot be left safely).* deadline passed: .*rank 3 '
    ;;
  two_at_once)
    three_hosts
    "${launch[@]}" --hostfile hosts2 -n 4 "$program" "${autotp[@]}" >first 2>&1 &
    run=$!
    conforms --hostfile hosts2 -n 4
    wait "$run" || { cat first; fail "the first of two runs failed"; }
    ;;
  *) fail "unknown scenario $scenario" ;;
esac
