//! Parameter lists of models that everybody knows, without the models.

use clap::ValueEnum;
use serde::Serialize;

/// Whose parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Params {
    /// 161 tensors, 25.6 million elements.
    Resnet50,
    /// 199 tensors, 109.5 million elements.
    BertBase,
    /// 2,000 tensors of 1,000 elements.
    ManySmall,
}

impl Params {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Resnet50 => "resnet50",
            Self::BertBase => "bert-base",
            Self::ManySmall => "many-small",
        }
    }

    /// Elements of each parameter, in the order of declaration.
    pub(crate) fn lens(self) -> Vec<usize> {
        match self {
            Self::Resnet50 => resnet50(),
            Self::BertBase => bert_base(),
            Self::ManySmall => vec![1000; 2000],
        }
    }
}

fn resnet50() -> Vec<usize> {
    fn conv(lens: &mut Vec<usize>, inputs: usize, outputs: usize, side: usize) {
        // Weights, then scale and shift of the batch norm after it.
        lens.extend([outputs * inputs * side * side, outputs, outputs]);
    }
    let mut lens = Vec::new();
    conv(&mut lens, 3, 64, 7);
    let mut inputs = 64;
    for (blocks, width) in [(3, 64), (4, 128), (6, 256), (3, 512)] {
        for block in 0..blocks {
            conv(&mut lens, inputs, width, 1);
            conv(&mut lens, width, width, 3);
            conv(&mut lens, width, 4 * width, 1);
            if block == 0 {
                conv(&mut lens, inputs, 4 * width, 1);
            }
            inputs = 4 * width;
        }
    }
    lens.extend([1000 * 2048, 1000]);
    lens
}

fn bert_base() -> Vec<usize> {
    const H: usize = 768;
    let mut lens = vec![30522 * H, 512 * H, 2 * H, H, H];
    for _ in 0..12 {
        for _ in 0..4 {
            lens.extend([H * H, H]);
        }
        lens.extend([H, H, 4 * H * H, 4 * H, 4 * H * H, H, H, H]);
    }
    lens.extend([H * H, H]);
    lens
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_have_the_known_sizes() {
        let count = |params: Params| (params.lens().len(), params.lens().iter().sum::<usize>());
        assert_eq!(count(Params::Resnet50), (161, 25_557_032));
        assert_eq!(count(Params::BertBase), (199, 109_482_240));
        assert_eq!(count(Params::ManySmall), (2000, 2_000_000));
    }
}
