//! Layers: what goes forward, what comes back.

use super::matrix::Matrix;

/// What a [`Net`](super::Net) takes.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A row of features per example.
    Dense(Matrix),
    /// A bag of indices per example, for an embedding bag.
    Bags {
        /// All indices, bag after bag.
        indices: Vec<usize>,
        /// Where each bag starts.
        offsets: Vec<usize>,
    },
}

impl From<Matrix> for Input {
    fn from(matrix: Matrix) -> Self {
        Self::Dense(matrix)
    }
}

/// What an embedding bag does with its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bag {
    /// Adds them up.
    Sum,
    /// Takes their mean.
    Mean,
}

/// A layer; numbers are indices of its parameters and buffers in the net.
#[derive(Debug, Clone)]
pub(crate) enum Layer {
    Linear(Linear),
    Relu,
    EmbeddingBag {
        table: usize,
        bag: Bag,
    },
    BatchNorm {
        weight: usize,
        bias: usize,
        mean: usize,
        var: usize,
        count: usize,
    },
    /// `x + linear(x)`, or `x` alone while it is switched off.
    Branch {
        linear: Linear,
        name: String,
        active: bool,
    },
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Linear {
    pub(crate) weight: usize,
    pub(crate) bias: usize,
}

/// What backward needs of a layer's forward.
#[derive(Debug, Clone)]
pub(crate) enum Saved {
    Input(Matrix),
    Bags(Vec<usize>, Vec<usize>),
    /// Normalised values and the inverse deviation of each column.
    Norm(Matrix, Vec<f32>),
    Nothing,
}

pub(crate) const EPS: f32 = 1e-5;
pub(crate) const MOMENTUM: f32 = 0.1;

pub(crate) fn linear(x: &Matrix, weight: &[f32], bias: &[f32]) -> Matrix {
    let mut out = x.times_transposed(weight, bias.len());
    for i in 0..out.rows() {
        out.row_mut(i)
            .iter_mut()
            .zip(bias)
            .for_each(|(out, bias)| *out += bias);
    }
    out
}

pub(crate) fn relu(x: &Matrix) -> Matrix {
    let values = x.data().iter().map(|value| value.max(0.0));
    Matrix::new(x.rows(), x.cols(), values.collect())
}

/// The gradient where the input was positive.
pub(crate) fn relu_back(x: &Matrix, grad: &Matrix) -> Matrix {
    let pairs = x.data().iter().zip(grad.data());
    let values = pairs.map(|(&x, &grad)| if x > 0.0 { grad } else { 0.0 });
    Matrix::new(x.rows(), x.cols(), values.collect())
}

/// The bags' ranges in the indices.
pub(crate) fn bags(indices: &[usize], offsets: &[usize]) -> Vec<std::ops::Range<usize>> {
    let ends = offsets.iter().skip(1).copied().chain([indices.len()]);
    offsets
        .iter()
        .copied()
        .zip(ends)
        .map(|(from, to)| from..to)
        .collect()
}

pub(crate) fn weight_of(bag: Bag, len: usize) -> f32 {
    match bag {
        Bag::Sum => 1.0,
        Bag::Mean => 1.0 / len.max(1) as f32,
    }
}

pub(crate) fn embedding_bag(
    table: &[f32],
    dim: usize,
    bag: Bag,
    indices: &[usize],
    offsets: &[usize],
) -> Matrix {
    let mut out = Matrix::zeros(offsets.len(), dim);
    for (i, range) in bags(indices, offsets).into_iter().enumerate() {
        let weight = weight_of(bag, range.len());
        for &index in &indices[range] {
            let row = &table[index * dim..][..dim];
            out.row_mut(i)
                .iter_mut()
                .zip(row)
                .for_each(|(out, value)| *out += value);
        }
        out.row_mut(i).iter_mut().for_each(|out| *out *= weight);
    }
    out
}

/// Rows and values of the gradient: one row per index, in order.
pub(crate) fn embedding_bag_back(
    grad: &Matrix,
    bag: Bag,
    indices: &[usize],
    offsets: &[usize],
) -> (Vec<i64>, Vec<f32>) {
    let mut values = Vec::with_capacity(indices.len() * grad.cols());
    for (i, range) in bags(indices, offsets).into_iter().enumerate() {
        let weight = weight_of(bag, range.len());
        for _ in range {
            values.extend(grad.row(i).iter().map(|value| value * weight));
        }
    }
    (indices.iter().map(|&index| index as i64).collect(), values)
}

/// Mean and biased variance of each column.
pub(crate) fn moments(x: &Matrix) -> (Vec<f32>, Vec<f32>) {
    let n = x.rows() as f32;
    let mean: Vec<f32> = x.column_sums().iter().map(|sum| sum / n).collect();
    let mut var = vec![0.0; x.cols()];
    for i in 0..x.rows() {
        for ((var, value), mean) in var.iter_mut().zip(x.row(i)).zip(&mean) {
            *var += (value - mean) * (value - mean);
        }
    }
    var.iter_mut().for_each(|var| *var /= n);
    (mean, var)
}

/// Normalised values and the inverse deviations.
pub(crate) fn normalize(x: &Matrix, mean: &[f32], var: &[f32]) -> (Matrix, Vec<f32>) {
    let inverse: Vec<f32> = var.iter().map(|var| 1.0 / (var + EPS).sqrt()).collect();
    let mut out = x.clone();
    for i in 0..x.rows() {
        for ((out, mean), inverse) in out.row_mut(i).iter_mut().zip(mean).zip(&inverse) {
            *out = (*out - mean) * inverse;
        }
    }
    (out, inverse)
}

pub(crate) fn scale_shift(normal: &Matrix, weight: &[f32], bias: &[f32]) -> Matrix {
    let mut out = normal.clone();
    for i in 0..out.rows() {
        for ((out, weight), bias) in out.row_mut(i).iter_mut().zip(weight).zip(bias) {
            *out = *out * weight + bias;
        }
    }
    out
}

/// The gradients of input, weight and bias of a batch norm in training.
pub(crate) fn batch_norm_back(
    normal: &Matrix,
    inverse: &[f32],
    weight: &[f32],
    grad: &Matrix,
) -> (Matrix, Vec<f32>, Vec<f32>) {
    let n = normal.rows() as f32;
    let grad_bias = grad.column_sums();
    let mut grad_weight = vec![0.0; normal.cols()];
    for i in 0..normal.rows() {
        let pairs = grad.row(i).iter().zip(normal.row(i));
        grad_weight
            .iter_mut()
            .zip(pairs)
            .for_each(|(sum, (g, x))| *sum += g * x);
    }
    let mut out = grad.clone();
    for i in 0..normal.rows() {
        for (j, out) in out.row_mut(i).iter_mut().enumerate() {
            let centred = *out - grad_bias[j] / n - normal.row(i)[j] * grad_weight[j] / n;
            *out = centred * weight[j] * inverse[j];
        }
    }
    (out, grad_weight, grad_bias)
}
