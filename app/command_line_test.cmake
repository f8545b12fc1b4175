# SPDX-License-Identifier: Apache-2.0
# Runs PROGRAM as a user would, in FOLDER, and holds exit codes and words to what is documented.
# usage: cmake -DPROGRAM=... -DFOLDER=... -DSOURCE=... -P command_line_test.cmake
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})
set(problems "")
# What is said is compared, not how it is broken into lines.
set(ENV{COLUMNS} 100000)

# expect(CODE PATTERN ARGUMENT...): the exit code, and a regular expression that must match what is
# printed.
function(expect code pattern)
  execute_process(COMMAND ${PROGRAM} ${ARGN} WORKING_DIRECTORY ${FOLDER} RESULT_VARIABLE result
    OUTPUT_VARIABLE output ERROR_VARIABLE output)
  list(JOIN ARGN " " arguments)
  if(NOT result STREQUAL code)
    string(APPEND problems "isoshard ${arguments}: exit ${result} instead of ${code}: ${output}\n")
  elseif(NOT output MATCHES "${pattern}")
    string(APPEND problems "isoshard ${arguments}: does not say '${pattern}': ${output}\n")
  endif()
  set(problems "${problems}" PARENT_SCOPE)
endfunction()

set(one_case --preset small --tp 2 --dp 2 --subjects autotp --dtype fp32)
set(oracle ${SOURCE}/fixtures/oracle/qwen2_untied_mha)

expect(0 "CONFORMS.*8 of 8 cases conform" verify --preset small)
expect(0 "CONFORMS.*dp 2 x tp 2.*1 of 1 case conforms" verify ${one_case})
expect(0 "repeated +3 runs, all equal bit by bit.*1 of 1 case conforms"
  verify ${one_case} --repeat 3 --verbose)
expect(0 "autotp, copy of DeepSpeed AutoTP.*CONFORMS .exact: equal to its declared arithmetic, \
which is within bounds." verify ${one_case} --require exact --verbose)
expect(1 "CONFORMS .within tolerance..*weakest: misses scale errors below.*NOT ENOUGH.*must be \
exact, got within tolerance.*1 of 1 case conforms .within tolerance., 1 of them more weakly than \
required"
  verify ${one_case} --reference plain --require exact)
expect(0 "autotp +copy of DeepSpeed AutoTP" list subjects)
expect(0 "4 of 4 cases conform" verify --model ${oracle} --tp 2 --dp 2)
expect(0 "2 of 2 cases conform" verify --preset small --optimizer adamw --tp 2 --dp 2 --dtype bf16)
expect(0 "1 of 1 case conforms" verify --model ${oracle} --num-layers 1 ${one_case})
expect(3 "model.layers.2.input_layernorm.weight is missing" verify --model ${oracle} --num-layers 3
  ${one_case})
foreach(fault mlp_input_grad_partial dp_sum_missing embed_out_split_without_sp)
  expect(1 "first: .*likely cause: .*DIVERGES.*What broke.*0 of 1 case" verify --fault ${fault}
    --verbose)
  expect(1 "DIVERGES.*What broke.*Likely cause +[^n].*Where.*What to look at.*Repeat it.*0 of 1 \
case conforms, 1 diverges" verify --fault ${fault})
endforeach()
string(REPEAT "Genesis begins here. " 40 ids)
file(WRITE ${FOLDER}/bytes.bin "${ids}")
set(of_ids verify ${one_case} --data bytes.bin --data-dtype uint8)
expect(0 "1 of 1 case conforms" ${of_ids} --shuffle --tail drop)
expect(2 "35 samples are not a multiple of a global batch of 4 .dp 2 x batch size 2.: 3 are \
left over"
  ${of_ids} --tail error)
expect(3
  "bytes.bin: read as uint16, id [0-9]+ at place 0 of 420 is outside the model's vocabulary of 252"
  verify ${one_case} --data bytes.bin --data-dtype uint16)
expect(2 "random ids have no end, so there is no epoch to shuffle" verify ${one_case} --data random
  --shuffle)
expect(2 "unknown tail policy 'dorp' .did you mean 'drop'" ${of_ids} --tail dorp)
expect(0 "all equal.*8 of 8 cases conform" verify --model lattice --verbose)
expect(2 "bf16 holds only 256 exactly" verify --model lattice-2 --dtype bf16)
expect(0
  "declared arithmetic +[0-9]+ tensors bit-identical.*CONFORMS.*[0-9]+ tensors are \
bit-identical to the emulated reference.*1 of 1 case conforms"
  verify ${one_case} --reference both --reduction-order ring --micro-batches 2 --verbose)
expect(1 "DIVERGES.*tolerance is zero.*0 of 1 case" verify --reference emulated --fault
  dp_sum_missing)
expect(0 "declared arithmetic.*CONFORMS.*8 of 8 cases conform" verify --preset small --reference
  auto --verbose)
expect(0 "CONFORMS.*1 of 1 case" verify --fault bf16_hops)
expect(2 "unknown reference 'emulate' .did you mean 'emulated'" verify --reference emulate)
expect(2 "native.*ordered, ring or tree" verify --reduction-order native)
expect(2 "number of micro-batches must be at least 1, got 0" verify --micro-batches 0)
expect(0 "1 of 1 case conforms" verify --model tiny-gpt2 --steps 2 --tp 2 --dp 2 --subjects autotp
  --dtype bf16 --optimizer adamw --lr 0.01)
expect(2 "none of the selected subjects has a tp axis" verify --fault dp_sum_missing --tp 2)
expect(2 "from 1 to 1048576, got 9223372036854775807" verify ${one_case}
  --make-vocab-size-divisible-by 9223372036854775807)
expect(2 "learning rate must be above 0 and finite in fp32, got 1e.300"
  verify --learning-rate 1e300)
expect(4 "had no effect on" verify --fault dp_sum_missing --dp 1)
foreach(fault mlp_input_grad_partial embed_out_split_without_sp)
  expect(1 "Likely cause +[^n]" verify --fault ${fault} --model tiny-gpt2)
endforeach()
expect(1 "Likely cause +[^n]" verify --fault mlp_input_grad_partial --num-layers 1)
expect(2 "below 1, got inf: at 1 a run of zeros would pass" compare a b --rtol inf)
expect(0 "declared arithmetic.*1 of 1 case conforms" verify ${one_case} --loss-mean sum --verbose)
expect(0 "1 of 1 case" verify --fault signed_zero --dtype bf16)
expect(2 "did you mean 'verify'" verfy)
expect(2 "largest gradient norm .* must be at least 0 .*got -1" verify --max-grad-norm -1)
expect(2 "flash_attention_2" verify --attn-impl flash_attention_2)
expect(3 "config.json" verify --model ./missing_folder)
expect(3 "" verify --model ${SOURCE}/fixtures/text)

expect(0 "conforms" verify ${one_case} --output-dir reports)
foreach(name report.json report.txt junit.xml)
  if(NOT EXISTS ${FOLDER}/reports/${name})
    string(APPEND problems "--output-dir: no ${name}\n")
  endif()
endforeach()

expect(0 "conforms" verify ${one_case} --save-init-weights weights.safetensors --dump runs)
expect(0 "conforms" verify ${one_case} --init-weights weights.safetensors)
file(GLOB reference LIST_DIRECTORIES true ${FOLDER}/runs/reference_*)
expect(0 "CONFORMS" compare ${reference} runs/qwen2_tp2_dp2)
file(GLOB done ${FOLDER}/runs/qwen2_tp2_dp2/step*/rank00001.done)
file(REMOVE ${done})
expect(3 "rank00001" compare ${reference} runs/qwen2_tp2_dp2)

expect(0 "1 of 1 case conforms" verify ${one_case} --vocab-parallel --make-vocab-size-divisible-by 8
  --label-smoothing 0.1)
expect(2 "take --subjects autotp" verify --preset small --subjects ddp --dp 2 --vocab-parallel)
expect(2 "label smoothing must be in .*got 2" verify ${one_case} --label-smoothing 2)
expect(2 "autocast must be bf16 or fp16 with fp32 parameters, got fp64" verify --autocast fp64)

expect(0 "all 26 parameters of tp 1, 2, 4 are bit-equal, max diff = 0.0.*every claim holds"
  experiment init)
expect(0 "within the published 0.15 absolute" experiment growth --layers 2 --dtype bf16 --output-dir
  growth)
if(NOT EXISTS ${FOLDER}/growth/report.json)
  string(APPEND problems "experiment --output-dir: no report.json\n")
endif()
expect(2 "nothing selected: name an experiment" experiment)

expect(0 "qwen2_tied_gqa: conforms" oracle ${SOURCE}/fixtures/oracle/qwen2_tied_gqa)
expect(2 "at least one folder" oracle)
expect(0 "dp_sum_missing" list faults)
expect(0 "how it is injected\n  skips grad_reduce over dp\n" explain dp_sum_missing)
expect(0
  "cause clipping_not_applied.*meaning.*are not clipped.*claim.*rule: .*needs.*clipped \
gradients.*what looks like it and is not.*faults that have it"
  explain clipping_not_applied)
expect(0 "step.equivalence" list contracts)
expect(0
  "claim.*added once.*derivation.*counts tp times.*tests.*ColumnRowPair.*negative \
controls.*isoshard test ColumnRowPair.ABiasOnEveryRankCountsTpTimes"
  explain tp.row.bias)
expect(2 "did you mean 'tp.row.bias'" explain tp.row.bais)
expect(2 "did you mean 'dp_sum_missing'" explain dp_sum_misin)
expect(2 "did you mean 'dp_sum_missing'" verify --fault dp_sum_misin)
expect(2 "did you mean 'deepspeed'" verify --subjects deepsped --tp 2)
expect(2 "did you mean 'deepspeed'" bench --impl deepsped)
expect(2 "did you mean 'tiny-mistral'" verify --model tiny-mistrl)
expect(2 "did you mean 'small'" verify --preset smal)
expect(2 "did you mean 'tp-size'" verify --tp_sise 2)
expect(2 "did you mean 'test'" tset)
expect(2 "class of faults must be one of A to M, got 'Z'" faults --class AZ)
expect(2 "did you mean 'compare'" bench compre)
expect(0
  "the bug.*wrapper was never applied.*smallest case.*contracts that name it.*dp.grad.average"
  explain dp_sum_missing)
expect(2 "nothing selected: name a contract" explain)
expect(0 "example" verify --help)
expect(0 "2-rank test +passed.*ready" doctor)
expect(0 "^{[^a-z]*\"version\".*\"gpus\": [[]" doctor --resource-spec)
expect(2 "unknown option '--bla'" doctor --bla)
expect(0 "tp +2 +command line" verify --tp 2 --print-config)
set(ENV{ISOSHARD_TP} 4)
expect(2 "tp 4 does not divide" verify --preset small --dp 1)

if(problems)
  message(FATAL_ERROR "${problems}")
endif()
