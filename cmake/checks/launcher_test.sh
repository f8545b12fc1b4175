#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The launcher, run in a small tree with stand-ins for cmake, ctest, pip and apt-get that note each
# call, and for df.
# usage: launcher_test.sh LAUNCHER FOLDER   (FOLDER is emptied first)
set -euo pipefail
launcher=$1
work=$2/"a folder with blanks"
rm -rf -- "$2"
mkdir -p -- "$work"/{tree/{src,harness,fixtures,conformance,app,bench,cmake},stand-ins,torch}
# Nothing of the caller's may reach the launcher under test.
unset "${!OMPI_@}" "${!PMI@}" "${!SLURM_@}" "${!ISOSHARD_@}" LIBTORCH_ROOT CXX
cp -- "$launcher" "$work/tree/isoshard"
cd -- "$work/tree"
touch CMakeLists.txt src/a.cc
export CALLS=$work/calls STAND_INS=$work/stand-ins FAKE_INDEX=$work/index
export XDG_CACHE_HOME=$work/cache PATH=$work/stand-ins:$PATH
export LIBTORCH_ROOT=$work/torch ISOSHARD_SKIP_PACKAGES=1
: >"$CALLS"

stand_in() {
  { echo '#!/usr/bin/env bash'; cat; } >"$work/stand-ins/$1"
  chmod +x "$work/stand-ins/$1"
}
stand_in cmake <<'END'
case $1 in
  --version) echo "cmake version ${FAKE_CMAKE_VERSION:-3.31.0}"; exit ;;
  --build)
    echo build "${*:4:$#-5}" >>"$CALLS"
    [[ -z ${FAKE_BROKEN:-} ]] || { echo "a.cc: error: planted"; exit 1; }
    mkdir -p "$2/bin"
    [[ $* != *"--target isoshard_judge_app isoshard_ranks_c "* ]] || {
      printf '#!/usr/bin/env bash\n' >"$2/bin/isoshard-judge"
      chmod +x "$2/bin/isoshard-judge"
      exit
    }
    {
      echo '#!/usr/bin/env bash'
      echo '[[ -z ${ISOSHARD_JOBS:-} ]] || exit 9'
      echo 'printf "[%s]" "$@"'
      echo 'exit ${FAKE_CODE:-0}'
    } >"$2/bin/isoshard"
    chmod +x "$2/bin/isoshard"
    [[ $2 != *-gpu ]] || mv "$2/bin/isoshard" "$2/bin/isoshard-gpu"
    for target in "$@"; do
      [[ $target != tests/* ]] || install -D "$STAND_INS/gtest" "$2/$target"
    done ;;
  -DBUILD=*)
    echo index >>"$CALLS"
    sed "s,@BUILD@,${1#-DBUILD=},g" "$FAKE_INDEX" >"${2#-DINDEX=}" ;;
  *)
    echo configure "$*" >>"$CALLS"
    while [[ $1 != -B ]]; do shift; done
    printf 'build %s: link\n' bin/isoshard tests/sums_test tests/wide_test >"$2/build.ninja" ;;
esac
END
stand_in ctest <<'END'
echo "ctest $*" >>"$CALLS"
while [[ $1 != --output-junit ]]; do shift; done
printf '<testsuite name="x"\n\ttests="%s"\n\tfailures="0"\n' "${FAKE_TESTS:-3}" >"$2"
exit "${FAKE_CODE:-0}"
END
# A GoogleTest program with these tests.
stand_in gtest <<'END'
filter='*' list='' also=''
for argument in "$@"; do
  case $argument in
    --gtest_filter=*) filter=${argument#*=} ;;
    --gtest_list_tests) list=1 ;;
    --gtest_also_run_disabled_tests) also=1 ;;
  esac
done
fits() {
  local pattern
  local IFS=:
  set -f
  for pattern in $2; do [[ $1 != $pattern ]] || return 0; done
  return 1
}
no=''
[[ $filter != *-* ]] || no=${filter#*-}
suite='' ran=0
for name in Sums.Adds Sums.DISABLED_Fails All/Sums.Rounds/bf16 All/Sums.Rounds/fp32 Waits.Ends; do
  fits "$name" "${filter%%-*}" && ! fits "$name" "$no" || continue
  if [[ -n $list ]]; then
    [[ $suite == "${name%%.*}" ]] || echo "${name%%.*}."
    suite=${name%%.*}
    echo "  ${name#*.}  # GetParam() = 1"
  elif [[ $name != *DISABLED* || -n $also ]]; then
    echo "ran $name"
    ((++ran))
  fi
done
[[ -z $list ]] || exit "${FAKE_LIST_CODE:-0}"
echo "run ${0##*/} $*" >>"$CALLS"
((ran)) || exit 2
exit "${FAKE_CODE:-0}"
END
stand_in mpiexec <<'END'
echo "mpiexec $2 A=$A" >>"$CALLS"
shift 2
exec "$@"
END
stand_in apt-get <<'END'
echo "apt-get $*" >>"$CALLS"
exit 100
END
stand_in df <<'END'
echo Filesystem 1024-blocks Used Available
echo "disk 0 0 $((${FAKE_FREE_MIB:-100000} * 1024))"
END
stand_in python3 <<'END'
echo python3 "${*//$'\n'/ }" >>"$CALLS"
[[ -z ${FAKE_PIP_FAILS:-} ]] || { echo "ERROR: no network"; exit 1; }
while [[ $# -gt 0 && $1 != --target ]]; do shift; done
[[ $# -gt 1 ]] || exit 0
mkdir -p "$2/torch/lib" && echo x >"$2/torch/lib/libtorch_cpu.so"
END

failures=0
failed() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}
# expect CODE OUTPUT_PART CALLS COMMAND...: CALLS are the stand-ins' notes, joined by blanks.
expect() {
  local code=0 output calls want_code=$1 want_part=$2 want_calls=$3
  shift 3
  : >"$CALLS"
  output=$("$@" 2>&1 </dev/null) || code=$?
  calls=$(cut -d' ' -f1 "$CALLS" | paste -sd' ')
  if [[ $code != "$want_code" || $output != *"$want_part"* || $calls != "$want_calls" ]]; then
    printf 'FAILED: %s\n  exit code %s, expected %s\n' "$*" "$code" "$want_code"
    printf '  calls "%s", expected "%s"\n' "$calls" "$want_calls"
    printf '  output, expected to hold "%s":\n%s\n' "$want_part" "$output"
    failures=$((failures + 1))
  fi
}

# Help costs no build.
expect 0 "./isoshard judge -- torchrun" "" ./isoshard --help
expect 2 "./isoshard verify" "" ./isoshard

# The Python package: isoshard-judge alone, from a folder of its own, until the program is built.
expect 4 "a rank of mpirun or srun never builds" "python3" env PMI_RANK=0 ./isoshard judge -- x
expect 4 "got no program /nonexistent" "" env ISOSHARD_PYTHON=/nonexistent ./isoshard judge -- x
stand_in no_torch <<'END'
echo "it has no torch"
END
expect 4 "it has no torch" "" env ISOSHARD_PYTHON=no_torch ./isoshard judge -- x
expect 0 "" "python3 configure build python3" ./isoshard judge --steps 1 -- torchrun "a b"
[[ $(<"$CALLS") == *-DISOSHARD_JUDGE_ONLY=ON*"-m isoshard judge --steps 1 -- torchrun a b" ]] \
  || failed "not the judge alone, or other arguments: $(<"$CALLS")"
[[ -x build-judge/bin/isoshard-judge && ! -e build ]] || failed "the judge is in another folder"
expect 0 "" "python3 python3" ./isoshard preflight --ranks 2
expect 0 "" "python3 python3" env OMPI_COMM_WORLD_RANK=1 ./isoshard preflight
expect 0 "" "python3 configure build python3" \
  env -u LIBTORCH_ROOT ISOSHARD_CMAKE_ARGS=-DX=1 ./isoshard judge -- x
mkdir -p .ci
printf '%s\n' '#!/usr/bin/env bash' 'echo "wheel $*" >>"$CALLS"' 'echo "$1/a b.whl"' \
  '[[ -x $ISOSHARD_JUDGE && -z ${FAKE_BROKEN:-} ]]' >.ci/wheel
chmod +x .ci/wheel
expect 0 "pip install 'out/a b.whl'" "python3 configure build wheel" ./isoshard wheel out
expect 4 "could not be built" "python3 wheel" env FAKE_BROKEN=1 ./isoshard wheel
expect 4 "a Python with pip" "" env ISOSHARD_PYTHON=/nonexistent ./isoshard wheel
expect 0 "./isoshard wheel" "" ./isoshard wheel --help
expect 2 "./isoshard wheel" "" ./isoshard wheel --wrong
expect 2 "./isoshard wheel" "" ./isoshard wheel one two

expect 4 "a rank of mpirun or srun never builds" "" env OMPI_COMM_WORLD_RANK=0 ./isoshard verify
expect 4 "" "" env SLURM_STEP_ID=0 SLURM_PROCID=1 ./isoshard test
expect 0 "[verify][--tp 2]" "configure build" ./isoshard verify "--tp 2"
expect 0 "" "" ./isoshard build
expect 2 "./isoshard build" "" ./isoshard build x
expect 0 "" "python3 build python3" ./isoshard judge -- x
expect 0 "" "python3 python3" ./isoshard judge -- x
expect 7 "[verify]" "" env FAKE_CODE=7 ./isoshard verify
expect 0 "[verify]" "" env PMI_RANK=1 ./isoshard verify
expect 0 "[verify]" "" env ISOSHARD_JOBS=1 ./isoshard verify
expect 0 "isoshard test [CTEST OPTIONS]" "" ./isoshard --help
(cd / && expect 0 "[x]" "" "$work/tree/isoshard" x && exit "$failures") \
  || failures=$((failures + 1))

touch src/a.cc
expect 4 "the program is not built, or its sources changed" "" \
  env OMPI_COMM_WORLD_RANK=0 ./isoshard verify
expect 0 "[x]" "build" ./isoshard x
rm src/a.cc
expect 0 "[x]" "build" ./isoshard x
touch src/b.cc
expect 4 "error: planted" "build" env FAKE_BROKEN=1 ./isoshard x
expect 4 "error: planted" "build" env FAKE_BROKEN=1 ./isoshard x
expect 0 "[x]" "build" ./isoshard x
expect 0 "[x]" "configure build" env ISOSHARD_CMAKE_ARGS=-DX=1 ./isoshard x
expect 0 "[x]" "configure build" ./isoshard x

# CUDA is compiled when it is asked for, in a build folder of its own, and never otherwise.
: >"$CALLS"
ISOSHARD_CMAKE_ARGS=-DX=2 ./isoshard x >/dev/null 2>&1
[[ $(<"$CALLS") == *-DISOSHARD_CUDA=OFF* ]] || failed "CUDA is not switched off: $(<"$CALLS")"
expect 0 "[x]" "configure build" ./isoshard --gpu x
[[ $(<"$CALLS") == *"build-gpu "*-DISOSHARD_CUDA=ON* ]] || failed "CUDA is off: $(<"$CALLS")"
expect 0 "[y]" "" env ISOSHARD_GPU=1 ./isoshard y
expect 0 "" "build ctest" ./isoshard --gpu test -L gpu
expect 0 "[x]" "configure build" env ISOSHARD_GPU=0 ./isoshard x

touch src/c.cc
expect 0 "[1]" "build" bash -c './isoshard 2 & ./isoshard 1; wait $!'

expect 0 "" "build ctest" ./isoshard test
[[ $(<"$CALLS") == *"-LE ^(slow|gpu)$"* ]] || failed "slow tests are not left out"
expect 0 "" "build ctest" ./isoshard test -L slow
[[ $(<"$CALLS") != *-LE* ]] || failed "-L slow leaves slow tests out"
expect 0 "" "build ctest" ./isoshard test -R '^attached\.many$'
[[ $(<"$CALLS") != *-LE* ]] || failed "an entry that is named in full is left out if it is slow"
expect 0 "" "build ctest" ./isoshard test -R Sums
[[ $(<"$CALLS") == *-LE* ]] || failed "-R runs slow tests that were not named in full"
expect 1 "" "build ctest" env FAKE_CODE=8 ./isoshard test
expect 2 "no test ran" "build ctest" env FAKE_CODE=8 FAKE_TESTS=0 ./isoshard test -R nope
expect 2 "no test ran" "build ctest" env FAKE_TESTS=0 ./isoshard test -R nope
expect 4 "" "build ctest" env FAKE_CODE=3 ./isoshard test

# Tests by name: only what they need is built, and the command of each run is printed.
tab=$'\t'
cat >"$FAKE_INDEX" <<END
sums_test.Sums${tab}Sums${tab}unit${tab}-${tab}'@BUILD@/tests/sums_test'${tab}--gtest_filter=Sums.*
sums_test.Sums.2of2${tab}Sums${tab}unit,slow${tab}-${tab}'@BUILD@/tests/sums_test'${tab}-
sums_test.in_process${tab}Waits,Others${tab}unit${tab}-${tab}'@BUILD@/tests/sums_test'${tab}-
wide_test.n2${tab}Waits${tab}mpi${tab}A='b c'${tab}mpiexec -n 2 '@BUILD@/tests/wide_test'${tab}-
wide_test.n4${tab}Waits${tab}mpi,slow${tab}A=b${tab}mpiexec -n 4 '@BUILD@/tests/wide_test'${tab}-
pages${tab}-${tab}unit${tab}-${tab}bash pages.sh '@BUILD@/bin/isoshard' '@BUILD@/pages'${tab}-
package${tab}-${tab}slow${tab}-${tab}bash package.sh '-DBUILD=@BUILD@'${tab}-
python.live${tab}-${tab}slow,live${tab}-${tab}bash live.sh${tab}-
page_links${tab}-${tab}unit${tab}-${tab}bash links.sh${tab}-
page_walk${tab}-${tab}slow${tab}-${tab}bash walk.sh${tab}-
END
# expect_run CODE OUTPUT_PART NOTES COMMAND...: NOTES are the stand-ins' notes, without the index's,
# separated by ";".
expect_run() {
  local code=0 output notes want_code=$1 want_part=$2 want_notes=$3
  shift 3
  : >"$CALLS"
  output=$("$@" 2>&1 </dev/null) || code=$?
  notes=$(sed '/^index$/d' "$CALLS" | paste -sd';')
  [[ $code == "$want_code" && $output == *"$want_part"* && $notes == "$want_notes" ]] \
    || failed "$*
  exit code $code, expected $want_code
  notes '$notes', expected '$want_notes'
  output, expected to hold '$want_part': $output"
}
run=(./isoshard test)
expect_run 0 "'build/tests/sums_test' --gtest_filter='Sums.*:*/Sums.*'" \
  "build tests/sums_test;run sums_test --gtest_filter=Sums.*:*/Sums.*" "${run[@]}" Sums
expect_run 0 "sums_test' --gtest_filter=Sums.Adds --gtest_repeat=2" \
  "build tests/sums_test;run sums_test --gtest_filter=Sums.Adds --gtest_repeat=2" \
  "${run[@]}" Sums.Adds --gtest_repeat=2
expect_run 0 "ran All/Sums.Rounds/bf16" \
  "build tests/sums_test;run sums_test --gtest_filter=*/Sums.Rounds/*" "${run[@]}" Sums.Rounds
expect_run 0 "" "build tests/sums_test;run sums_test --gtest_filter=All/Sums.Rounds/fp32" \
  "${run[@]}" All/Sums.Rounds/fp32
expect_run 0 "" "build tests/sums_test;run sums_test\
 --gtest_filter=S?ms.A*:Sums.*-*.Rounds:*/*.Rounds:*.Rounds/*:*/*.Rounds/*" \
  "${run[@]}" 'S?ms.A*:Sums-*.Rounds'
expect_run 0 "" "build tests/sums_test;run sums_test --gtest_filter=*-Sums.*:*/Sums.*" \
  "${run[@]}" sums_test-Sums
# A disabled test runs when it is named, and not otherwise.
expect_run 2 "no test ran" "build tests/sums_test" "${run[@]}" 'Sums.*Fails'
expect_run 0 "ran Sums.DISABLED_Fails" "build tests/sums_test;run sums_test\
 --gtest_filter=Sums.DISABLED_Fails --gtest_also_run_disabled_tests" \
  "${run[@]}" Sums.DISABLED_Fails
# A slow way to run a suite is left out where there is another one, and said.
expect_run 0 "name them to run them): wide_test.n4" "build tests/sums_test tests/wide_test;\
run sums_test --gtest_filter=Waits.*;mpiexec 2 A=b c;run wide_test --gtest_filter=Waits.*" \
  "${run[@]}" Waits
expect_run 0 "env A='b c' mpiexec -n 2 'build/tests/wide_test'" "" "${run[@]}" -N Waits
# Entries of ctest
expect 0 "bash pages.sh '$PWD/build/bin/isoshard'" "build ctest" "${run[@]}" pages
[[ $(<"$CALLS") == "build bin/isoshard"* && $(<"$CALLS") == *"-R ^(pages)\$"* ]] \
  || failed "pages: $(<"$CALLS")"
expect 0 "" "build ctest" "${run[@]}" package
[[ $(<"$CALLS") == "build all"* ]] || failed "package: $(<"$CALLS")"
expect 0 "" "ctest" env ISOSHARD_PYTHON=python3 "${run[@]}" 'python.*'
# A wildcard leaves slow entries out where it fits others, and says so.
expect 0 "name them to run them): page_walk" "build ctest" "${run[@]}" 'page*'
[[ $(<"$CALLS") == *"-R ^(pages|page_links)\$"* ]] || failed "page*: $(<"$CALLS")"
expect 0 "" "ctest" "${run[@]}" 'page_w*'
[[ $(<"$CALLS") == *"-R ^(page_walk)\$"* ]] || failed "page_w*: $(<"$CALLS")"
# What is wrong
expect_run 2 "did you mean Sums?" "build build.ninja" "${run[@]}" Smus
expect_run 2 "did you mean Sums.Adds?" "build tests/sums_test" "${run[@]}" Sums.Addz
expect_run 2 "did you mean sums_test?" "build build.ninja" "${run[@]}" Sums:sms_test
expect_run 2 "-V is an option of ctest" "" "${run[@]}" Sums -V
for code in 1 139; do
  expect_run 1 "" "build tests/sums_test;run sums_test --gtest_filter=Sums.Adds" \
    env FAKE_CODE=$code "${run[@]}" Sums.Adds
done
expect_run 1 "" "build tests/sums_test;run sums_test\
 --gtest_filter=Sums.Adds:*/Sums.Adds:Sums.Adds/*:*/Sums.Adds/*" \
  env FAKE_CODE=139 FAKE_LIST_CODE=139 "${run[@]}" Sums.Adds
expect_run 4 "error: planted" "build tests/sums_test" env FAKE_BROKEN=1 "${run[@]}" Sums
# An option's value is no name.
for options in "-j 2" "-R Sums" "-E x -L unit" "--timeout 5 -VV" "-j -V" "-LE slow" "--repeat x"; do
  read -r -a words <<<"$options"
  expect 0 "" "build ctest" "${run[@]}" "${words[@]}"
  [[ $(<"$CALLS") == "build all"* ]] || failed "$options: $(<"$CALLS")"
done
# The program does not count as built when tests are.
touch src/d.cc
expect_run 0 "" "build tests/sums_test;run sums_test --gtest_filter=Sums.Adds" \
  "${run[@]}" Sums.Adds
expect 0 "[x]" "build" ./isoshard x

# The environment of the live tests: made once for one text of the pins, never half.
mkdir -p python
printf '%s\n' '# pins' one==1 two '' 'three==3  # --no-build-isolation' 'four==4  # --no-deps' \
  >python/live-requirements.txt
stand_in python3.11 <<'END'
echo venv >>"$CALLS"
mkdir -p "$3/bin"
{
  echo '#!/usr/bin/env bash'
  echo 'echo "pip ${*: -2}" >>"$CALLS"'
  echo '[[ -z ${FAKE_PIP_FAILS:-} ]] || { echo "ERROR: no network"; exit 1; }'
} >"$3/bin/python"
chmod +x "$3/bin/python"
END
expect 4 "no network" "build venv pip" env FAKE_PIP_FAILS=1 ./isoshard test -L live
[[ -z $(find "$XDG_CACHE_HOME/isoshard/live" -name bin) ]] || failed "half an environment is kept"
expect 0 "" "build venv pip pip pip ctest" ./isoshard test -L live
[[ $(grep pip "$CALLS" | paste -sd' ') == \
  "pip one==1 two pip --no-build-isolation three==3 pip --no-deps four==4" ]] \
  || failed "other packages or options: $(<"$CALLS")"
expect 0 "" "build ctest" ./isoshard test -L live
expect 0 "" "ctest" ./isoshard test python.live
expect 0 "" "build ctest" ./isoshard test --label-regex=live
echo five >>python/live-requirements.txt
expect 0 "" "build ctest" env ISOSHARD_PYTHON=python3 ./isoshard test -L live
expect 0 "" "build ctest" ./isoshard test -L python
expect 0 "" "venv pip pip pip ctest" ./isoshard test python.live

# A typing error costs no build.
rm -rf build
echo 'verify_command(), train_command(),' >app/program.cc
expect 2 "unknown command tset (did you mean test?)" "" ./isoshard tset
expect 2 "unknown command verfiy (did you mean verify?)" "" ./isoshard verfiy --preset small
expect 0 "[train]" "configure build" ./isoshard train
expect 0 "[tset]" "" ./isoshard tset
rm app/program.cc
touch src/d.cc

site=$XDG_CACHE_HOME/isoshard/libtorch-2.11.0/site
expect 4 "is no folder" "" env LIBTORCH_ROOT=/nonexistent ./isoshard x
expect 4 "no network" "python3" env -u LIBTORCH_ROOT FAKE_PIP_FAILS=1 ./isoshard x
[[ -z $(find "$XDG_CACHE_HOME" -name '*partial*' -o -name site) ]] \
  || failed "a failed download left files"
expect 0 "[x]" "python3 configure build" env -u LIBTORCH_ROOT ./isoshard x
[[ $(<"$CALLS") == *"--no-deps"*"torch==2.11.0 nvidia-cuda-runtime"* ]] \
  || failed "not the slim LibTorch: $(<"$CALLS")"
expect 0 "[x]" "" env -u LIBTORCH_ROOT ./isoshard x
# A full disk is told before the download.
expect 4 "needs 12000 MiB" "" env -u LIBTORCH_ROOT FAKE_FREE_MIB=11999 ./isoshard --gpu x
expect 0 "[x]" "python3 configure build" env -u LIBTORCH_ROOT FAKE_FREE_MIB=12000 ./isoshard --gpu x
[[ $(<"$CALLS") != *"--no-deps"* ]] || failed "not the LibTorch with CUDA: $(<"$CALLS")"
rm -r -- "$site"
expect 0 "[x]" "python3 configure build" env -u LIBTORCH_ROOT ./isoshard x

rm -rf build
if [[ $EUID -eq 0 ]]; then
  expect 4 "The line to try by hand" "apt-get apt-get apt-get apt-get" \
    env -u ISOSHARD_SKIP_PACKAGES CXX=/nonexistent/c++ ./isoshard x
fi

# Somebody who is not root. For root: in a namespace where it has another number.
other=(env)
[[ $EUID -ne 0 ]] || other=(unshare --user --map-user=1000 --map-group=1000)
if "${other[@]}" true 2>/dev/null; then
  stand_in sudo <<'END'
echo "sudo $1" >>"$CALLS"
shift
"$@"
END
  expect 4 "packages are missing. Run this line" "" \
    "${other[@]}" env -u ISOSHARD_SKIP_PACKAGES CXX=/nonexistent/c++ ./isoshard x
  expect 4 "The line to try by hand" "sudo apt-get sudo apt-get sudo apt-get sudo apt-get" \
    "${other[@]}" env -u ISOSHARD_SKIP_PACKAGES ISOSHARD_SUDO=1 CXX=/nonexistent/c++ ./isoshard x
fi

((failures == 0)) || { echo "$failures failed"; exit 1; }
rm -rf -- "$2"
echo "all passed"
